"""One command that starts the ranks of all machines (mpirun, srun), and a connection to each task that it started.

The command is left with starting processes and with looking after its own. What the ranks write, how they end, and
which signals they get goes over connections of ours, because every mpirun has another idea of that: MPICH's ends at
SIGUSR2 and kills at once where others wait, and none says in a way that a program can read how a rank has ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.ranks import kin
from instep.launch.ranks.signals import ENDING, PASSED_ON
from instep.launch.running.failure import signal_name
from instep.launch.tasks.link import Greeting, new_key
from instep.launch.tasks.task import VARIABLE
from instep.launch.tasks.taskserver import Task, TaskServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from instep.launch.ranks.signals import Signals

_WORDS = 200  # lines of the command's own that are kept
_SHOWN = 15  # of these in an error
_GREETING_S = 10.0
_GONE_S = 1.0  # after the command has ended: what its daemons need to end its tasks
_LEAVE_S = 8.0  # after the last task has left: what the command may need to end
_LEAVE_LOST_S = 0.5  # the same where a machine is lost, for whose tasks it would wait
_TICK_S = 1.0
_ASK_S = 30.0
_TELL_AFTER_S = 5.0  # a start that takes longer is explained by what the command says


class StoppedError(Exception):
    """A signal has come before anything was started.

    Attributes:
        number: which.

    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _check(signals: Signals) -> None:
    came = signals.take()
    for number in came:
        if number in ENDING:
            raise StoppedError(number)
    signals.put_back(number for number in came if number in PASSED_ON)  # for the ranks, when there are any


def _listen() -> socket.socket:
    """On a port of the kernel's own choice, as mpirun and srun listen themselves."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 switched off at run time
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


class Command:
    """A running mpirun or srun.

    Attributes:
        name: of the program.
        words: its last lines.
        tasks: rank -> task, of those that have called.
        on_lost: is told of a machine that is lost.

    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        world_size: int,
        addresses: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        """Start it.

        Args:
            name: for people: mpirun or srun.
            argv: the command line.
            world_size: how many tasks it is to start.
            addresses: of this machine, for the tasks.
            environ: of the command.

        Raises:
            RunError: it cannot be started.

        """
        self.name = name
        self.words: deque[str] = deque(maxlen=_WORDS)
        self.tasks: dict[int, Task] = {}
        self.on_lost: Callable[[str], object] = lambda _: None
        self._world_size = world_size
        self._key = new_key()
        self._odd: list[str] = []  # what tasks have said that cannot be
        self._new: list[Greeting] = []
        self._servers: list[TaskServer] = []
        self._log: Path | None = None
        self._rest = b""
        self._asked = 0
        self.status: int | None = None
        self._gone_at = 0.0
        self.next_at = time.monotonic() + _TICK_S
        self.selector = selectors.DefaultSelector()
        self._listening = _listen()
        self.selector.register(self._listening, selectors.EVENT_READ, self._accept)
        told = {
            "at": list(addresses),
            "port": self._listening.getsockname()[1],
            "key": self._key,
            "host": socket.gethostname(),
        }
        me = os.getpid()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={VARIABLE: json.dumps(told), **environ},  # first: see _hydra() in mpi.py
                start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone
                preexec_fn=partial(kin.die_with, me, signal.SIGTERM),  # noqa: PLW1509  # there are no threads yet
            )
        except OSError as error:
            self.close()
            raise RunError(f"{name} cannot be started", evidence=[str(error)]) from error
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.selector.register(self._process.stdout, selectors.EVENT_READ, self._read_words)
        self._end = os.pidfd_open(self._process.pid)
        self.selector.register(self._end, selectors.EVENT_READ, self._ended)

    # The beginning: until all tasks have called

    def meet(
        self,
        signals: Signals,
        say: Callable[[Sequence[str]], None],
        *,
        parts: Sequence[tuple[str, range]],
        limit_s: float | None,
    ) -> None:
        """Wait until all tasks have called.

        Args:
            signals: those that come meanwhile.
            say: prints lines for the user.
            parts: machines and ranks.
            limit_s: how long to wait; None: as long as the command lives, since it may wait for a machine itself.

        Raises:
            RunError: the command has ended, or its tasks are not the ranks that were asked for.
            StoppedError: somebody wants an end.

        """
        begin = time.monotonic()
        told, next_note = 0, begin + _TELL_AFTER_S
        while len(self.tasks) < self._world_size:
            _check(signals)
            self.pump(0.1)
            if self._odd:
                raise self._error(f"{self.name} has not started the ranks that it was asked for", self._odd)
            closed = [task for task in self.tasks.values() if task.link.is_closed]
            if self.status is not None or closed:
                self._settle()
                raise self._error(f"{self.name} did not start the ranks{self._how()}", [])
            if limit_s is not None and time.monotonic() > begin + limit_s:
                count = f"{len(self.tasks)} of {self._world_size}"
                raise self._error(f"after {limit_s:g} s {self.name} has started {count} ranks", self._missing(parts))
            if time.monotonic() > next_note:
                said = list(self.words)
                say([f"… waiting for {self.name}, {', '.join(self._missing(parts))}", *said[told:]])
                told, next_note = len(said), time.monotonic() + 3 * _TELL_AFTER_S

    def _missing(self, parts: Sequence[tuple[str, range]]) -> list[str]:
        """Where ranks are that have not called."""
        missing = [(host, [rank for rank in ranks if rank not in self.tasks]) for host, ranks in parts]
        return [f"rank {', '.join(map(str, ranks))} on {host}" for host, ranks in missing if ranks]

    def _settle(self) -> None:
        """Read what the command says at its end."""
        end = time.monotonic() + 2.0
        while time.monotonic() < end and (self.status is None or self.pump(0.05)):
            self.pump(0.05)

    def _how(self) -> str:
        if self.status is None:
            return ""
        ended = f"was killed by {signal_name(-self.status)}" if self.status < 0 else f"exit code {self.status}"
        return f" ({ended})"

    def _error(self, what: str, evidence: Sequence[str]) -> RunError:
        return RunError(what, evidence=[*evidence, *self.last_words()])

    def last_words(self) -> list[str]:
        """What the command said, without its rulers: of much the beginning, which often has the cause, and the end."""
        lines = [line for line in self.words if line.strip("-* ")]
        return lines if len(lines) <= _SHOWN else [*lines[: _SHOWN // 2], "...", *lines[-_SHOWN // 2 :]]

    def pump(self, wait_s: float = 0.0) -> bool:
        """Take what has come; False where there was nothing."""
        ready = self.selector.select(wait_s)
        for key, _ in ready:
            if key.fd in self.selector.get_map():
                key.data()
        return bool(ready)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listening.accept()
            greeting = Greeting(connection, self._key)
            self._new.append(greeting)
            self.selector.register(greeting.link, selectors.EVENT_READ, partial(self._greet, greeting))

    def _greet(self, greeting: Greeting) -> None:
        number = greeting.link.fileno()
        said = greeting.hear()
        if said is None and not greeting.link.is_closed:
            return
        self.selector.unregister(number)
        self._new.remove(greeting)
        if said is not None:
            self._take_on(Task(greeting.link, said))

    def _take_on(self, task: Task) -> None:
        said = task.said
        where = f"{said['host']} (pid {said['pid']})"
        if said["why"]:
            self._odd.append(f"{where}: {said['why']}")
        elif said["world_size"] != self._world_size:
            self._odd.append(f"{where}: rank {task.rank} of {said['world_size']}, not of {self._world_size}")
        elif task.rank in self.tasks:
            self._odd.append(f"{where}: rank {task.rank}, and so is {self.tasks[task.rank].said['host']}")
        else:
            self.tasks[task.rank] = task
            self.selector.register(task.link, selectors.EVENT_READ, partial(self._hear, task))
            self._hear(task)

    def ask(self, kind: str, questions: Mapping[int, Any], signals: Signals) -> dict[int, Any]:
        """Ask these ranks something; their answers.

        Raises:
            RunError: one does not answer.
            StoppedError: somebody wants an end.

        """
        self._asked += 1
        asked, end = self._asked, time.monotonic() + _ASK_S
        for rank, value in questions.items():
            self.tasks[rank].link.send({"ask": [asked, kind, value]})
        while missing := [rank for rank in questions if asked not in self.tasks[rank].answers]:
            _check(signals)
            self.pump(0.1)
            self.tick(time.monotonic())
            gone = [rank for rank in missing if self.tasks[rank].link.is_closed]
            if gone or self.status is not None or time.monotonic() > end:
                self._settle()
                hosts = ", ".join(dict.fromkeys(str(self.tasks[rank].said["host"]) for rank in gone or missing))
                raise self._error(f"no answer from {hosts} before the ranks were started{self._how()}", [])
        return {rank: self.tasks[rank].answers.pop(asked)[1] for rank in questions}

    def compare_clocks(self, signals: Signals) -> None:
        """Learn what each machine's monotonic clock says now."""
        for rank, task in self.tasks.items():
            before = time.monotonic()
            (clock,) = self.ask("clock", {rank: None}, signals).values()
            task.ahead = clock - (before + time.monotonic()) / 2

    # The job

    def servers(self, parts: Sequence[tuple[str, range]], log: Path) -> list[TaskServer]:
        """Of each machine the one who stands for its ranks.

        Args:
            parts: machine and ranks.
            log: the file for what the command says.

        """
        self._log = log
        self._write_words(list(self.words))
        self._servers = [TaskServer(self, host, ranks) for host, ranks in parts]
        return self._servers

    def _server_of(self, task: Task) -> TaskServer | None:
        return next((server for server in self._servers if task.rank in server.ranks), None)

    def _hear(self, task: Task) -> None:
        now = time.monotonic()
        task.link.flush()
        server = self._server_of(task)
        for message in task.link.receive():
            ((kind, told),) = message.items()
            if kind == "answer":
                task.answers[told[0]] = (now, told[1])
            elif server is not None:
                server.take(task, kind, told)
        if task.link.is_closed:
            self.hang_up(task)

    def hang_up(self, task: Task) -> None:
        """The connection has ended, or shall: the task, if there is one, then ends its rank and leaves."""
        number = task.link.fileno()
        if number >= 0:
            self.selector.unregister(number)
            task.link.close()
            if (server := self._server_of(task)) is not None:
                server.closed(task, time.monotonic())

    def tick(self, now: float) -> None:
        """See whether machines are still there, and what became of those that are not."""
        self.next_at = now + _TICK_S
        for greeting in [one for one in self._new if now - one.since > _GREETING_S]:
            self.selector.unregister(greeting.link.fileno())
            greeting.link.close()
            self._new.remove(greeting)
        for task in self.tasks.values():
            task.link.flush()
            task.link.look()
            if task.link.is_closed or (self.status is not None and now >= self._gone_at):
                self.hang_up(task)
        for server in self._servers:
            server.explain(now)
        marks = [server.lost_at for server in self._servers if server.lost_at is not None]
        marks += [self._gone_at] if self.status is not None and now < self._gone_at else []
        self.next_at = min([self.next_at, *marks])

    # The command

    def _read_words(self) -> None:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(source)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        said = [line.decode(errors="replace").rstrip("\r") for line in lines]
        self.words.extend(said)
        self._write_words(said)

    def _write_words(self, lines: Sequence[str]) -> None:
        if self._log is not None and lines:
            with suppress(OSError), self._log.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)

    def _ended(self) -> None:
        self.selector.unregister(self._end)
        self.status = self._process.wait()
        self._gone_at = time.monotonic() + _GONE_S
        self.next_at = min(self.next_at, self._gone_at)

    def why(self, task: Task, host: str) -> tuple[int | None, str]:
        """Why a connection has ended: the status of the command where it is that, and a sentence."""
        if task.link.is_silent:
            return None, f"{host} is out of reach ({task.link.why})"
        if self.status is not None:
            how = (
                f"was killed by {signal_name(-self.status)}"
                if self.status < 0
                else f"left with exit code {self.status}"
            )
            words = [f"\n  {line}" for line in self.last_words()] if self.status > 0 else []
            return self.status, f"{self.name} {how}, and the ranks with it{''.join(words)}"
        return None, f"what {self.name} had started on {host} for rank {task.rank} has gone, and the rank with it"

    def finish(self) -> None:
        """All tasks have left: wait for the command, which has nothing more to do."""
        is_whole = not any(server.was_lost for server in self._servers)
        end = time.monotonic() + (_LEAVE_S if is_whole else _LEAVE_LOST_S)
        while self.status is None and time.monotonic() < end:
            self.pump(0.1)
        self.close()

    def close(self) -> None:
        """End the command and all that it has started: the tasks end with their connections."""
        for link in [*(task.link for task in self.tasks.values()), *(greeting.link for greeting in self._new)]:
            link.close()
        self._listening.close()
        process = getattr(self, "_process", None)
        if process is None:
            return
        if process.poll() is None:
            process.terminate()  # mpirun then removes its files
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            process.wait()
        kin.end_descendants(0, 0)
        for server in self._servers:
            server.close()
        with suppress(OSError):
            os.close(self._end)
