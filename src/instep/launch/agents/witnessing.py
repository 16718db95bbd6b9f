"""The guard's eyes on an agent's machine: the folder of the ranks' records, and what the launcher's watch is told."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Protocol

from instep.guard import storage
from instep.guard.folders import make_folder
from instep.guard.watch import LOOK_S
from instep.guard.witness import Witness
from instep.runs import exit_code_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.planning.place import Place

_BACKLOG = 1 << 18  # bytes: a launcher that takes nothing (Ctrl-Z) is told nothing new


class Launcher(Protocol):
    """The connection to it."""

    @property
    def waiting(self) -> int:
        """Bytes that are still to be sent."""

    def send(self, message: Mapping[str, Any], /) -> None:
        """Send a message."""


class Witnessing:
    """Watches the ranks of one round.

    Attributes:
        folder: where the ranks write their records.
        next_at: when :meth:`tick` has something to do, by the monotonic clock.

    """

    def __init__(self, place: Place, host: str, restart: int, channel: Launcher) -> None:
        """Make the folder; the ranks are not there yet.

        Raises:
            OSError: it cannot be made.

        """
        self.folder, self._lock = make_folder()
        self.next_at = float("inf")
        self._count = place.count
        self._restart = restart
        self._channel = channel
        self._witness = Witness(self.folder, place.world_size, host, place.ranks)
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int | None] = {}

    def started(self, pids: Mapping[str, int]) -> None:
        """The ranks are there."""
        self._pids = {int(rank): pid for rank, pid in pids.items()}
        self.next_at = 0.0

    def ended(self, rank: int, status: int) -> bytes:
        """A rank has ended.

        Returns:
            what its interpreter wrote at that moment, if a signal ended it: it belongs into its log.

        """
        self._codes[rank] = exit_code_of(status)
        self._tell(at_once=True)
        if len(self._codes) == self._count:
            self._send(self._witness.last_words(self._pids, self._codes))
        return storage.read_fatal(self.folder, rank).encode() if status < 0 else b""

    def take(self, message: Sequence[Any]) -> None:
        """Hear what the watch wants."""
        restart, told = message
        if restart == self._restart:
            self._send(self._witness.take(told, self._pids, self._codes))
            self.next_at = min(self.next_at, self._witness.next_at)

    def tick(self, now: float) -> None:
        """Tell the watch what is new, if it is time."""
        if now >= self.next_at:
            self._tell()

    def _tell(self, *, at_once: bool = False) -> None:
        if self._channel.waiting > _BACKLOG:
            self.next_at = time.monotonic() + LOOK_S
            return
        self._send(self._witness.tell(self._pids, self._codes, at_once=at_once))
        self.next_at = self._witness.next_at

    def _send(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self._channel.send({"guard": [self._restart, message]})

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
