"""Watch the ranks of one job on all its machines, from the first fork to the last sweep."""

from __future__ import annotations

import selectors
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.ranks.signals import ENDING
from instep.launch.running.failure import Event, decide_at, event_of_end, event_of_report, first_failure
from instep.runs import exit_code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from instep.guard.watch import Found
    from instep.launch.ranks.server import Server
    from instep.launch.ranks.signals import Signals
    from instep.launch.running.guarding import Guarding
    from instep.launch.running.output import Output

TERM_S = 2.5  # what the other ranks have between SIGTERM and SIGKILL when one has failed
SAME_PRESS_S = 0.2  # `timeout` and some terminals send the same signal twice
_GIVE_UP_S = 5.0  # a process that SIGKILL does not end waits inside the kernel; nobody can do more


@dataclass(frozen=True)
class Lost:
    """A machine's server that is there no more.

    Attributes:
        host: the machine.
        status: of the server, -N for signal N, None where nobody knows.
        why: one line.
        time: when it was noticed, by the monotonic clock.

    """

    host: str
    status: int | None
    why: str
    time: float

    @property
    def exit_code(self) -> int:
        """What the run ends with."""
        return exit_code_of(self.status) if self.status else 1


class Supervisor:
    """Watches one job.

    Attributes:
        pids: of the ranks, once they have been forked.
        exit_codes: of the ranks that have gone.
        failure: what failed first, where something did.
        verdict: why the ranks were ended, where they were out of step.
        signal: the signal by which somebody asked for the end, 0 for none.
        wants_no_more: whether such a signal has come at all, also while the ranks were being ended for another reason.
        lost: the first server that went before its ranks, where one did.
        lost_hosts: the machines of all servers that did.
        error: why the launcher itself ended the ranks.
        leftovers: processes that outlived their rank and had to be ended.

    """

    def __init__(
        self,
        servers: Sequence[Server],
        output: Output,
        signals: Signals,
        listener: Listener,
        *,
        grace: float,
        guarding: Guarding | None = None,
    ) -> None:
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self.failure: Event | None = None
        self.verdict: Found | None = None
        self.signal = 0
        self.wants_no_more = False
        self.lost: Lost | None = None
        self.lost_hosts: list[str] = []
        self.error: RunError | None = None
        self.leftovers: list[str] = []
        self._servers = list(servers)
        self._output = output
        self._grace = grace
        self._listener = listener
        self._guarding = guarding
        self._alive = {rank for server in servers for rank in server.ranks}
        self._events: list[Event] = []
        self._signals = signals
        self._early: list[int] = []  # to be passed on to ranks that are not there yet
        self._signal_time = 0.0
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._unswept: set[str] = set()
        self._chores: list[Callable[[], bool]] = []
        self._selector = selectors.DefaultSelector()
        for server in servers:
            for descriptor in server.descriptors():
                self._selector.register(descriptor, selectors.EVENT_READ, partial(self._hear, server))
        self._selector.register(output, selectors.EVENT_READ, self._pump)
        self._selector.register(signals, selectors.EVENT_READ, self._take_signals)

    def add_chore(self, chore: Callable[[], bool]) -> None:
        """Call this now and then, until it returns True."""
        self._chores.append(chore)

    def watch(self) -> None:
        """Return when every process of the job has gone."""
        while self._alive and not self._given_up():
            self._wait(self._timeout())
            self._chores = [chore for chore in self._chores if not chore()]
            self._decide(time.monotonic())
            self._look()
        self._sweep()
        if self.error is None:
            self._guard(self._output.finish)

    # What comes in

    def _wait(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # what was heard before may have ended this one
                key.data()
        now = time.monotonic()
        for server in list(self._servers):
            if server.next_at is not None and now >= server.next_at:
                server.tick(now)
                self._hear(server)

    def _timeout(self) -> float | None:
        marks = [mark for mark in (self._kill_at, self._give_up_at) if mark is not None]
        marks += [server.next_at for server in self._servers if server.next_at is not None]
        if self._events and self.is_calm:
            marks.append(decide_at(self._events))
        elif self._guarding and self._guarding.is_watching and self.is_calm and self.pids:
            marks.append(self._guarding.next_at)
        now = time.monotonic()
        if self._chores:
            marks.append(now + 0.1)
        return max(0.0, min(marks) - now) if marks else None

    @property
    def is_calm(self) -> bool:
        """Nobody has been told to end."""
        told = (self.failure, self.verdict, self.lost, self.error)
        return not self.signal and all(one is None for one in told)

    def _pump(self) -> None:
        self._guard(self._output.pump)

    def _guard(self, work: Callable[[], object]) -> None:
        """Do something with the logs; if they cannot be written, nobody shall train on unseen."""
        try:
            work()
        except RunError as error:
            self.error = error
            with suppress(KeyError):
                self._selector.unregister(self._output)
            self._kill()

    def _hear(self, server: Server) -> None:
        for message in server.hear():
            self._take(server, message)

    def _take(self, server: Server, message: Mapping[str, Any]) -> None:
        ((kind, told),) = message.items()
        if kind == "started":
            self.pids.update({int(rank): pid for rank, pid in told.items()})
            for number in self._early:
                server.signal(number)
        elif kind == "output":
            self._guard(partial(self._output.feed, **told))
        elif kind == "report":
            self._events.append(event_of_report(told))
        elif kind == "ended":
            self._rank_ended(**told)
        elif kind == "swept":
            self.leftovers += told
            self._unswept.discard(server.host)
        elif kind == "lost":
            self._lose(server, **told)

    def _rank_ended(self, rank: int, status: int, time: float) -> None:
        self._alive.discard(rank)
        self.exit_codes[rank] = exit_code_of(status)
        if status < 0 and self._guarding:
            self._guard(partial(self._guarding.rank_ended, rank))
        event = event_of_end(rank, status, time)
        if event is not None:
            self._events.append(event)

    def _lose(self, server: Server, status: int | None, why: str) -> None:
        """A server has gone before its ranks, which are killed with it: the others cannot go on without them."""
        self._servers.remove(server)
        self._unswept.discard(server.host)
        for key in [key for key in self._selector.get_map().values() if getattr(key.data, "args", ()) == (server,)]:
            self._selector.unregister(key.fileobj)
        gone = self._alive.intersection(server.ranks)
        for rank in gone:
            self.exit_codes[rank] = exit_code_of(-signal.SIGKILL)
        self._alive -= gone
        if not gone:
            return
        self.lost_hosts.append(server.host)
        if self.is_calm:
            now = time.monotonic()
            self.lost = Lost(server.host, status, why, now)
            self._listener.lost(self, self.lost, len(self._alive))
            self._signal(signal.SIGTERM)
            self._kill_at = now + TERM_S

    def _signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for server in self._servers:
            here = None if ranks is None else [rank for rank in ranks if rank in server.ranks]
            if here is None or here:
                server.signal(number, here)

    # What is done about it

    def _decide(self, now: float) -> None:
        if self._events and self.is_calm and (not self._alive or now >= decide_at(self._events)):
            event = first_failure(self._events)
            self._guard(self._output.drain)
            found = self._guarding.explain(event, self.pids, self.exit_codes) if self._guarding else None
            if found is not None:
                self._out_of_step(found)
            else:
                self._fail(event, now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _look(self) -> None:
        """Whether the ranks are in step. One that fails is looked at when it is decided who failed first."""
        if self._guarding and self.pids and self._alive and not self._events and self.is_calm:
            found = self._guarding.look(self.pids, self.exit_codes)
            if found is not None:
                self._out_of_step(found)

    def _out_of_step(self, found: Found) -> None:
        """Tell it, and end all: the culprit first, so that nobody complains of its going before."""
        self.verdict = found
        self._guard(self._output.drain)
        assert self._guarding is not None
        self._guarding.end(found, {rank: self.pids[rank] for rank in self._alive})
        for ranks in end_order(found.verdict.ranks, self._alive):
            self._signal(signal.SIGTERM, ranks)
        self._kill_at = time.monotonic() + TERM_S

    def _fail(self, event: Event, now: float) -> None:
        """Name the culprit and end the others. Those that are on their way out keep their time to leave."""
        self.failure = event
        others = sorted(self._alive - {event.rank for event in self._events})
        self._listener.failed(self, event, len(self._alive - {event.rank}))
        self._signal(signal.SIGTERM, others)
        self._kill_at = now + TERM_S

    def _kill(self) -> None:
        """SIGKILL for all that are left."""
        self._kill_at = None
        self._give_up_at = time.monotonic() + _GIVE_UP_S
        for server in list(self._servers):
            if self.pids.keys().isdisjoint(server.ranks):  # still importing: there are no ranks, and it does not listen
                server.kill()
                self._hear(server)
            else:
                server.signal(signal.SIGKILL)

    def _given_up(self) -> bool:
        return self._give_up_at is not None and time.monotonic() > self._give_up_at

    def _sweep(self) -> None:
        """End what the ranks left behind. A rank's helpers have a moment to see that it has gone."""
        calm = self.is_calm
        moment = 1.0 if calm else 0.2
        self._unswept = {server.host for server in self._servers}
        for server in self._servers:
            server.sweep(moment, moment)
        deadline = time.monotonic() + 2 * moment + 2 * _GIVE_UP_S
        while self._unswept and time.monotonic() < deadline:
            self._wait(0.1)
        for server in self._servers:
            if server.host in self._unswept:
                server.kill()
            else:
                server.end()
        if not calm:
            self.leftovers = []  # the children of ranks that were made to leave

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGWINCH:
                self._output.resize()
            elif number in ENDING:
                self._asked_to_end(number)
            elif self.pids:
                self._signal(number)
            else:
                self._early.append(number)

    def _asked_to_end(self, number: int) -> None:
        now = time.monotonic()
        self.wants_no_more = True
        twice = self.signal and now - self._signal_time < SAME_PRESS_S
        if twice or not self._alive:
            return
        again = bool(self.signal or self.failure or self.verdict or self.lost)
        if not again:
            self.signal, self._signal_time = number, now
        self._listener.asked_to_end(self, number, again=again)
        if again or not self.pids:
            self._kill()
        else:
            self._signal(number)
            self._kill_at = now + self._grace


def end_order(culprits: Collection[int], alive: Iterable[int]) -> tuple[list[int], list[int]]:
    """Whom to end first, and then whom."""
    left = sorted(alive)
    first = [rank for rank in left if rank in culprits]
    return first, [rank for rank in left if rank not in first]


class Listener:
    """What tells the user. Each method is called at the moment it is named after."""

    def failed(self, job: Supervisor, event: Event, others: int) -> None:
        """A rank has failed, and the others will be ended."""

    def lost(self, job: Supervisor, lost: Lost, others: int) -> None:
        """A machine is out of reach or its server has gone, and the other ranks will be ended."""

    def asked_to_end(self, job: Supervisor, number: int, *, again: bool) -> None:
        """A signal has come, for the first time or again."""
