"""End a run on this machine: ask its launcher, then see that no process of it is left. Standard library only.

Whom a signal may reach is decided twice: by the marker in the environment, and by a pidfd, through which no process
that got the number since can be met.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from instep.launch.registry.sightings import Process, processes
from instep.runs import launcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AGAIN_S = 0.3  # the launcher takes two signals within 0.2 s for one
_LAUNCHER_S = 6.0  # what the launcher needs to kill all ranks and to write the record
_DEAD_S = 5.0  # a process that SIGKILL does not end waits inside the kernel; nobody can do more
_LOOK_S = 0.02


@dataclass(frozen=True)
class Ended:
    """What was done on a machine.

    Attributes:
        launcher: number of the launcher that was asked here, None where it is not here.
        told: names of the processes of the run that were ended without it.
        killed: how many of them needed SIGKILL.
        left: names of those that even that did not end.
        seconds: until nothing was left.

    """

    launcher: int | None
    told: tuple[str, ...]
    killed: int
    left: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def end_here(job: str, record: Mapping[str, Any] | None, grace: float) -> Ended:
    """End the run on this machine, and wait until it has gone.

    Args:
        job: its marker.
        record: its ``run.json``, which says who the launcher is.
        grace: seconds between SIGTERM and SIGKILL.

    """
    begin = time.monotonic()
    asked = None
    if record is not None and launcher.is_alive(record):
        asked = int(record["pid"])
        _ask_launcher(asked, record, grace)
    told, killed, left = _sweep(job, 0.0 if asked else grace)
    return Ended(asked, tuple(told), killed, tuple(left), round(time.monotonic() - begin, 3))


def _ask_launcher(pid: int, record: Mapping[str, Any], grace: float) -> None:
    """SIGTERM, which it passes on to the ranks; once more, upon which it kills them; then it is killed itself."""
    with _held(pid) as process:
        if process is None or not launcher.is_alive(record):  # looked at after the pidfd: it is the one
            return
        _send(process, signal.SIGTERM)
        _send(process, signal.SIGCONT)  # one that was stopped by Ctrl-Z takes no signal
        if _has_gone(process, max(grace, _AGAIN_S)):
            return
        _send(process, signal.SIGTERM)
        if not _has_gone(process, _LAUNCHER_S):
            _send(process, signal.SIGKILL)
            _has_gone(process, _DEAD_S)


def _sweep(job: str, grace: float) -> tuple[list[str], int, list[str]]:
    """End whatever carries the marker."""
    told: dict[int, str] = {}
    killed: set[int] = set()
    begin = time.monotonic()
    moment = begin + 0.5  # what a launcher that has just gone may still have on its way out
    while left := processes(job):
        now = time.monotonic()
        if now > begin + grace + _DEAD_S:
            return list(told.values()), len(killed), [one.name for one in left]
        for one in left:
            if now >= max(begin + grace, moment if not grace else 0.0):
                killed.add(one.pid)
                _send_to(one, signal.SIGKILL, told)
            elif grace and one.pid not in told:
                _send_to(one, signal.SIGTERM, told)
                _send_to(one, signal.SIGCONT, told)
        time.sleep(_LOOK_S)
    return list(told.values()), len(killed), []


def _send_to(one: Process, number: int, told: dict[int, str]) -> None:
    told.setdefault(one.pid, one.name)
    with _held(one.pid) as process:
        if process is not None and launcher.started(one.pid) == one.since:
            _send(process, number)


@contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """A pidfd; None where the process has gone."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        os.close(process)


def _send(process: int, number: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(process, number)


def _has_gone(process: int, seconds: float) -> bool:
    """Wait for its end."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))
