"""Signals to the launcher, as something that can be read like a message."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self  # for the type checker only: Python has it from 3.11 on

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


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

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        with suppress(BlockingIOError):
            self._near.recv(4096)
        got, self._got = self._got, []
        return got
