"""Signals to the launcher, as something that can be read like a message."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from typing_extensions import Self  # for the type checker only: Python has it from 3.11 on

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def would_end(pid: int, number: int) -> bool:
    """Whether the process does nothing yet about this signal, which would therefore end it.

    That is so of every Python program until it has set its handler, which may take it a minute of imports.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*([0-9a-f]+)$", text, re.MULTILINE)
    return bool(masks) and not any(int(mask, 16) >> (number - 1) & 1 for mask in masks) and not _fetches(pid)


def _fetches(pid: int) -> bool:
    """Whether one of its threads stands in sigwait(): meanwhile the kernel does not show what that has blocked."""
    with suppress(OSError):
        return any("sigtimedwait" in (task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return False


class Signals:
    """While it is entered, signals interrupt nothing: they wait here, and its descriptor becomes readable.

    One that the caller has told us to ignore (nohup, a shell's ``&``) stays ignored.
    """

    def __init__(self) -> None:
        self._got: list[int] = []
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        self._before = {}
        for number in (*ENDING, *PASSED_ON, signal.SIGWINCH):
            if number == signal.SIGWINCH or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)

    def _take(self, number: int, _: FrameType | None) -> None:
        self._got.append(number)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._near.fileno()

    def put_back(self, numbers: Iterable[int]) -> None:
        """Leave these for a later :meth:`take`, as if they had come now."""
        if numbers := list(numbers):
            self._got[:0] = numbers
            with suppress(BlockingIOError):
                self._far.send(b"\0")

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        with suppress(BlockingIOError):
            self._near.recv(4096)
        got, self._got = self._got, []
        return got
