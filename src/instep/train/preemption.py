"""Asked to end: signals and a time limit set a flag; the ranks agree about it at a step boundary."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from instep.errors import TrainError
from instep.runs import EXIT_PREEMPTED

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from typing_extensions import Self

SAME_S = 0.5  # Slurm and the launcher both pass on that the job shall end
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Preempted(SystemExit):
    """Training was asked to end, has saved, and can go on: the process ends with exit code 75 unless this is caught.

    Attributes:
        reason: the signal or the limit, and the rank that it came to.
        path: the checkpoint.

    """

    def __init__(self, reason: str, path: Path | None) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.reason = reason
        self.path = path


class Preemption:
    """While it is entered, the first signal only sets :attr:`asked`; one that comes later ends the process.

    What comes within half a second is the same signal: Slurm and the launcher both send it.

    Outside of the main thread Python allows no handlers: there only the time limit counts.

    Args:
        limit_s: seconds after which the run is asked to end, from when the process started; None: never.
        signals: whether to listen to signals.

    """

    def __init__(self, limit_s: float | None, *, signals: bool) -> None:
        self.asked: str | None = None
        self._limit_s = limit_s
        self._numbers = SIGNALS if signals else ()
        self._before: dict[int, Any] = {}
        self._asked_at = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def look_at_the_clock(self) -> None:
        """Set the flag when the time is up."""
        if self._limit_s is not None and self.asked is None and running_s() >= self._limit_s:
            self.asked = f"max_time of {self._limit_s:g} s"

    def _take(self, number: int, _: FrameType | None) -> None:
        # Nothing but a flag here: the main thread may be anywhere, also inside a collective or half-way in a save.
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number).name, time.monotonic()
            return
        if time.monotonic() - self._asked_at < SAME_S:
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_began = time.monotonic()


def running_s() -> float:
    """Seconds since this module was imported, or since the process started where the system tells."""
    try:
        import psutil

        return time.time() - psutil.Process().create_time()
    except OSError:
        return time.monotonic() - _began


def seconds(limit: object) -> float | None:
    """A time limit in seconds: ``"23:50:00"``, ``"1-12:00:00"`` (days, as Slurm writes it), ``"50:00"``, or a number.

    Raises:
        TrainError: it is none of these.

    """
    if limit is None:
        return None
    if isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 < limit < float("inf"):
        return float(limit)
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d{1,2}):(\d{2})(?:\.0*)?", limit) if isinstance(limit, str) else None
    if found is None:
        raise TrainError(
            "max_time is no time.",
            evidence=[f"max_time={limit!r}"],
            cure='max_time="23:50:00", or seconds: max_time=600',
        )
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
