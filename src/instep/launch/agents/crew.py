"""The agents of one job, all of them: start them, ask them, end them."""

from __future__ import annotations

import os
import random
import selectors
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from instep import __version__
from instep.errors import RunError
from instep.launch.agents import PROTOCOL
from instep.launch.agents.remote import Connection, Heart
from instep.launch.agents.ssh import explain, is_busy, is_here
from instep.launch.agents.sweep import Sweep
from instep.launch.ranks.signals import ENDING, PASSED_ON
from instep.launch.tasks.command import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from instep.launch.agents.ssh import Way
    from instep.launch.ranks.signals import Signals
    from instep.world.hosts import Host

HELLO_S = 20.0  # for an agent to come up: ssh gives up connecting after 10 s
_LEAVE_S = 2.0
_MOST_REFUSALS = 5
_PATIENCE_S, _MORE_PATIENCE_S = 2.0, 15.0
_ANSWERS = {"look": "facts", "listen": "listening", "reach": "reached"}


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        value: what the agent said.
        asked_at: seconds since 1970, when it was asked.
        received_at: when the answer had come.

    """

    value: Any
    asked_at: float
    received_at: float


class Patience:
    """When to say what is waited for: nobody shall wonder what goes on."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PATIENCE_S

    def is_over(self) -> bool:
        """Whether it is time for a word; then the next one has more time."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _MORE_PATIENCE_S
        return True


def _print(lines: list[str]) -> None:
    """Before there is a run."""
    print("\n".join(lines), file=sys.stderr, flush=True)


class LostError(RunError):
    """A machine was lost while it was looked at."""


class Crew:
    """The connections to all agents, by the names of their machines.

    Attributes:
        connections: those that are there or were; see :attr:`Connection.is_lost`.
        failures: why a machine has no agent, of the last attempt.
        say: tells the user.
        early: signals for the ranks that have come before there were any.
        started_at: when the last attempt began, by the monotonic clock.
        sweeps: of machines that were lost with ranks on them.

    """

    def __init__(
        self,
        hosts: Sequence[Host],
        way: Way,
        marker: str,
        *,
        hello: Callable[[Host], dict[str, Any]],
        signals: Signals,
        heart: Heart,
    ) -> None:
        """Start none yet.

        Args:
            hosts: all machines that may take part, in the user's order.
            way: how they are reached.
            marker: the job's name in the environment of all its processes.
            hello: what the agent of a host is told first.
            signals: that ask for an end.
            heart: what pings the agents.

        """
        self.hosts = {host.name: host for host in hosts}
        self.way, self.marker = way, marker
        self.connections: dict[str, Connection] = {}
        self.failures: dict[str, RunError] = {}
        self.sweeps: list[Sweep] = []
        self.on_words: Callable[[str, list[str]], None] | None = None
        self._hello = hello
        self.early: list[int] = []
        self.say: Callable[[list[str]], object] = _print
        self._signals = signals
        self._heart = heart
        self.started_at: dict[str, float] = {}
        self._refused: dict[str, int] = {}  # how often a server was too busy
        self._again_at: dict[str, float] = {}

    @property
    def is_remote(self) -> bool:
        """Whether any machine is another one."""
        return any(not one.is_here for one in self.connections.values())

    # Starting

    def start(self, names: Iterable[str], *, connect_s: float = 10.0) -> None:
        """Start agents on these machines, all at once; :meth:`wait` sees who comes up.

        Raises:
            RunError: there is no ssh here, or no such interpreter.

        """
        for name in names:
            host = self.hosts[name]
            here = is_here(host)
            argv = self.way.child() if here else self.way.agent(host, self.marker, connect_s=connect_s)
            try:
                connection = Connection(name, argv, marker=self.marker, is_here=here)
            except OSError as error:
                what = f"{argv[0]} cannot be started: {error.strerror}"
                cure = "name another interpreter:  --python PATH" if here else "sudo apt-get install openssh-client"
                raise RunError(what, cure=cure) from error
            self.connections[name] = connection
            self._again_at.pop(name, None)
            self.started_at[name] = time.monotonic()
            connection.ask("hello", {"protocol": PROTOCOL, "host": name, **self._hello(host)})
            self._heart.connections.append(connection)

    def up(self) -> list[str]:
        """The machines whose agents are there, in the user's order."""
        return [name for name in self.hosts if (one := self.connections.get(name)) and one.hello and not one.is_lost]

    def absent(self, members: Sequence[str]) -> list[str]:
        """Lines on those that do not take part, and why."""
        up = self.up()
        others = [name for name in self.hosts if name not in members]
        return [f"{name} is spare" if name in up else f"without {name}: {self.why_not(name)}" for name in others]

    def why_not(self, name: str) -> str:
        """Why a machine is not there, in one line."""
        failure = self.failures.get(name)
        return failure.what if failure else self.connections[name].why or "no answer yet"

    def coming(self) -> list[str]:
        """Those that may still come up."""
        there = self.connections.items()
        return [name for name, one in there if name in self._again_at or not (one.hello or one.is_lost)]

    def wait(self, limit_s: float) -> None:
        """Until something has come, or a little later.

        Raises:
            StoppedError: somebody wants an end.

        """
        for name, messages in self._hear(limit_s).items():
            self._greet(name, messages)
        now = time.monotonic()
        self.start([name for name, moment in self._again_at.items() if now >= moment])
        for name in self.coming():
            if now - self.started_at[name] > HELLO_S:
                self._fail(name, None)

    def _greet(self, name: str, messages: Iterable[dict[str, Any]]) -> None:
        connection = self.connections[name]
        for message in messages:
            if "hello" in message:
                connection.hello = message["hello"]
                if error := _misfit(name, connection.hello):
                    connection.lose(error.what)
                    self.failures[name] = error
                    return
                self.failures.pop(name, None)
                connection.ping()  # of the others, one has waited for the agent to come up
            elif "error" in message:
                self.failures[name] = _error_of(name, message["error"])
                connection.lose(message["error"]["what"])
        if connection.is_lost and not connection.hello and name not in self.failures:
            self._fail(name, connection.status)

    def _fail(self, name: str, status: int | None) -> None:
        connection = self.connections[name]
        words = [*connection.channel.noise, *connection.words]
        error = explain(name, status, words, self.way)
        connection.lose(error.what)
        refused = self._refused.get(name, 0)
        if is_busy(words) and refused < _MOST_REFUSALS:
            self._refused[name] = refused + 1
            self._again_at[name] = time.monotonic() + random.uniform(0.2, 0.5 * 2**refused)  # noqa: S311  # no secret
        else:
            self.failures[name] = error

    # Asking

    def ask(self, kind: str, told: Mapping[str, Any], limit_s: float) -> dict[str, Said]:
        """Ask these machines, all at once, and wait for their answers.

        Raises:
            LostError: one is lost.
            RunError: one says that it cannot, or does not answer in time.
            StoppedError: somebody wants an end.

        """
        asked_at, deadline = time.time(), time.monotonic() + limit_s
        patience = Patience()
        for name, value in told.items():
            self.connections[name].ask(kind, value)
        found: dict[str, Said] = {}
        while missing := [name for name in told if name not in found]:
            for name, messages in self._hear(max(0.0, min(1.0, deadline - time.monotonic()))).items():
                if name not in told:  # one that has come up late
                    self._greet(name, messages)
                    continue
                for message in messages:
                    if "error" in message:
                        raise _error_of(name, message["error"])
                    if _ANSWERS[kind] in message:
                        found[name] = Said(message[_ANSWERS[kind]], asked_at, time.time())
            missing = [name for name in missing if name not in found]
            self._see_that_they_live(missing)
            if missing and patience.is_over():
                self.say([f"… waiting for {', '.join(missing)}: {_PURPOSES[kind]}"])
            if missing and time.monotonic() > deadline:
                raise RunError(
                    f"{', '.join(missing)}: no answer within {limit_s:g} s",
                    evidence=[f"asked: {_PURPOSES[kind]}"],
                    cure=f"see what keeps it:  ssh {missing[0]} uptime",
                )
        return found

    def _see_that_they_live(self, names: Iterable[str]) -> None:
        for name in names:
            connection = self.connections[name]
            connection.look(time.monotonic())
            if connection.is_lost:
                raise LostError(
                    f"{name} was lost before anything was started",
                    evidence=[connection.why],
                    cure="start again when it is back, or without it",
                )

    def hear(self, name: str, limit_s: float) -> list[dict[str, Any]]:
        """What one of them says, waited for.

        Raises:
            StoppedError: somebody wants an end.

        """
        found = self._hear(limit_s).get(name, [])
        self.connections[name].look(time.monotonic())
        return found

    def _hear(self, limit_s: float) -> dict[str, list[dict[str, Any]]]:
        """What the agents say, waited for."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ, None)
            for name, connection in self.connections.items():
                if not connection.is_lost:
                    for descriptor in connection.descriptors():
                        selector.register(descriptor, selectors.EVENT_READ, name)
                    if connection.channel.waiting:
                        selector.register(connection.channel.sink, selectors.EVENT_WRITE, name)
            ready = {key.data for key, _ in selector.select(limit_s)}
        numbers = self._signals.take()
        for at, number in enumerate(numbers):
            if number in ENDING:
                self._signals.put_back(numbers[:at] + numbers[at + 1 :])
                raise StoppedError(number)
        self.early += [number for number in numbers if number in PASSED_ON]
        for name in ready - {None}:
            self.connections[name].channel.flush()
        return {name: self.connections[name].hear() for name in sorted(ready - {None})}

    def rest(self, seconds: float) -> None:
        """Let time pass, but hear what comes.

        Raises:
            StoppedError: somebody wants an end.

        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.wait(min(left, 0.5))

    # The end

    def watch_over(self, names: Iterable[str]) -> None:
        """From now on these have ranks: who is lost is looked at once more."""
        for name in names:
            connection = self.connections[name]
            connection.on_lost = partial(self._lost, connection)
            connection.on_words = partial(self.on_words, name) if self.on_words else None

    def _lost(self, connection: Connection) -> None:
        self.sweeps.append(Sweep(connection.host, self.marker, self.way, is_here=connection.is_here))

    def finish_sweeps(self) -> list[str]:
        """Wait for them; lines on what was found."""
        said = []
        sweeps, self.sweeps = self.sweeps, []
        for sweep in sweeps:
            sweep.wait()
            if sweep.ended:
                said.append(f"{sweep.host}: ended what was left there: {', '.join(sweep.ended[:5])}")
            elif sweep.why:
                said.append(f"{sweep.host}: could not be looked at again ({sweep.why}); its agent ends all by itself")
        return said

    def close(self) -> None:
        """End all agents."""
        self._heart.connections.clear()
        until = time.monotonic() + _LEAVE_S
        for connection in self.connections.values():
            connection.on_lost = None
            connection.ask("end", None)
        for connection in self.connections.values():
            connection.close(until if connection.hello else 0.0)


_PURPOSES = {
    "look": "its versions, its folder, its addresses",
    "listen": "to hold a port",
    "reach": "which of the others it reaches",
}


def _misfit(name: str, hello: Mapping[str, Any]) -> RunError | None:
    if hello.get("protocol") == PROTOCOL:
        return None
    return RunError(
        f"the instep on {name} is another version",
        evidence=[f"{name}: {hello.get('version')} ({hello.get('python')})", f"here: {__version__}"],
        cure=f"there:  {hello.get('python')} -m pip install instep=={__version__}",
    )


def _error_of(name: str, said: Mapping[str, Any]) -> RunError:
    return RunError(f"{name}: {said['what']}", evidence=said["evidence"], cure=said["cure"])


def together(failures: Mapping[str, RunError]) -> RunError:
    """One error for all machines that cannot take part."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    cures = deque(dict.fromkeys(error.cure for error in failures.values() if error.cure))
    evidence = []
    for name, error in failures.items():
        evidence += [f"{name}: {error.what}", *(f"  {line}" for line in error.evidence[:2])]
    return RunError(
        f"{len(failures)} machines cannot take part: {', '.join(failures)}",
        evidence=evidence,
        cure=os.linesep.join(cures),
    )
