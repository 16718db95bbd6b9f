"""The ranks of one machine that mpirun or srun has started, as the supervisor sees them; and the task of each."""

from __future__ import annotations

import base64
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.tasks.command import Command
    from instep.launch.tasks.link import Link

EXPLAIN_S = 0.4  # after a connection has ended: whether the command says why


@dataclass
class Task:
    """The process that stands for one rank.

    Attributes:
        link: the connection to it.
        said: what it has said of itself, see :func:`instep.launch.tasks.task.who`.
        ahead: seconds by which its monotonic clock is ahead of ours.
        pid: of the rank, 0 before it was started.
        has_ended: the rank has.
        swept: what had to be ended after the rank; None while nobody has looked.

    """

    link: Link
    said: Mapping[str, Any]
    ahead: float = 0.0
    pid: int = 0
    has_ended: bool = False
    swept: list[str] | None = None
    answers: dict[int, tuple[float, Any]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Which rank."""
        return int(self.said["rank"])


class TaskServer:
    """The ranks of one machine, as the supervisor sees them: see :class:`instep.launch.ranks.server.Server`."""

    def __init__(self, command: Command, host: str, ranks: range) -> None:
        self.host, self.ranks = host, ranks
        self.lost_at: float | None = None
        self.was_lost = False
        self._lost: tuple[Task, float] | None = None
        self._is_over = False  # nothing more is to be told
        self._command = command
        self._queue: list[dict[str, Any]] = []
        self._guard: list[Sequence[Any]] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._all = os.dup(command.selector.fileno())

    @property
    def _tasks(self) -> list[Task]:
        return [self._command.tasks[rank] for rank in self.ranks]

    @property
    def _leader(self) -> Task:
        """The one that looks at the machine for all of them."""
        return self._command.tasks[self.ranks[0]]

    @property
    def is_lost(self) -> bool:
        """Whether nobody is there any more."""
        return self.was_lost

    def ask_guard(self, told: Sequence[Any]) -> None:
        """Tell the guard's witness something."""
        self._leader.link.send({"guard": told})

    def take_guard(self) -> list[Sequence[Any]]:
        """What the guard's witness there has said; all that comes besides waits for :meth:`hear`."""
        self._command.pump()
        told, self._guard = self._guard, []
        return told

    @property
    def next_at(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return None if self._is_over else self._command.next_at

    def descriptors(self) -> Sequence[int]:
        """Readable when there is something to hear."""
        return (self._all, self._bell)

    def tick(self, now: float) -> None:
        """See whether the machines are still there."""
        self._command.tick(now)

    def hear(self) -> list[dict[str, Any]]:
        """What has come."""
        self._command.pump()
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        found, self._queue = self._queue, []
        return found

    def _tell(self, message: dict[str, Any]) -> None:
        self._queue.append(message)
        os.eventfd_write(self._bell, 1)

    def start(self, told: Mapping[str, Any]) -> None:
        """Start the ranks: see :meth:`instep.launch.tasks.task.Task`."""
        for task in self._tasks:
            task.link.send({"start": {**told, "rank": task.rank}})

    def take(self, task: Task, kind: str, told: Any) -> None:
        """What the task of one of our ranks has said."""
        if self._is_over:
            return
        rank = task.rank
        if kind == "started":
            task.pid = told
            if all(one.pid for one in self._tasks):
                pids = {str(one.rank): one.pid for one in self._tasks}
                self._leader.link.send({"all_started": pids})
                self._tell({"started": pids})
        elif kind == "output":
            self._tell({"output": {"rank": rank, "stream": told[0], "data": base64.b64decode(told[1])}})
        elif kind == "report":
            self._tell({"report": {**told, "time": told["time"] - task.ahead}})
        elif kind == "ended":
            task.has_ended = True
            self._leader.link.send({"one_ended": [rank, told[0]]})
            self._tell({"ended": {"rank": rank, "status": told[0], "time": told[1] - task.ahead}})
        elif kind == "guard":
            self._guard.append(told)
            os.eventfd_write(self._bell, 1)
        elif kind == "fatal":
            self._tell({"output": {"rank": told[0], "stream": 2, "data": base64.b64decode(told[1])}})
        elif kind == "failed":
            self._lose(None, f"on {self.host} {told}")
        elif kind == "swept":
            task.swept = told
            self._see_swept()

    def closed(self, task: Task, now: float) -> None:
        """A connection has ended. Where its rank had not, wait a moment for an explanation."""
        if task.has_ended:
            task.swept = task.swept or []
            self._see_swept()
        elif not self._is_over and self._lost is None:
            self._lost = (task, now)
            self.lost_at = now + EXPLAIN_S
            self._command.next_at = min(self._command.next_at, self.lost_at)

    def explain(self, now: float) -> None:
        """Tell of the loss, once it is time."""
        if self._lost is not None and self.lost_at is not None and now >= self.lost_at:
            self._lose(*self._command.why(self._lost[0], self.host))

    def _lose(self, status: int | None, why: str) -> None:
        """The ranks of this machine are given up: whoever is still connected ends his, since nobody else will."""
        if not self._is_over:
            self._is_over, self.was_lost, self.lost_at = True, True, None
            self._tell({"lost": {"status": status, "why": why}})
            self._command.on_lost(self.host)
            for task in self._tasks:
                self._command.hang_up(task)

    def _see_swept(self) -> None:
        if not self._is_over and all(task.swept is not None for task in self._tasks):
            self._is_over = True
            self._tell({"swept": [f"{name} on {self.host}" for task in self._tasks for name in task.swept or ()]})

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks, or to all of this machine."""
        for task in self._tasks:
            if ranks is None or task.rank in ranks:
                task.link.send({"signal": number})

    def sweep(self, patience: float, kind: float) -> None:
        """End whatever the ranks left behind, then the tasks."""
        for task in self._tasks:
            task.link.send({"sweep": [patience, kind]})

    def kill(self) -> None:
        """End the ranks at once."""
        self._lose(None, f"the ranks on {self.host} were ended before they began")

    def end(self) -> None:
        """Wait for the command, which has nothing more to do."""
        self._command.finish()

    def close(self) -> None:
        """Give back the descriptors."""
        for number in self.descriptors():
            with suppress(OSError):
                os.close(number)
