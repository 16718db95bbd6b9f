"""The launcher's side of an agent: the connection, and the ranks of one round as the supervisor sees them."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from instep.launch.agents import PING_S, SILENT_S
from instep.launch.agents.channel import Channel
from instep.launch.running.failure import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from typing_extensions import Self

_NO_WORSE_S = 0.002  # a round trip that took so much longer than the fastest one says as much of the clocks
_LEAVE_S = 2.0


class Connection:
    """One agent.

    Attributes:
        host: the machine, as the user named it.
        is_here: whether it is this one, so that the agent is a child without ssh.
        channel: what is said and heard.
        words: the last lines that came by standard error: of ssh, of the agent, of what it has started.
        hello: what the agent has said of itself; empty before.
        why: why there is no connection any more, "" while there is one.
        status: of ssh or the agent, None while it is there or where it was killed from here.

    """

    def __init__(self, host: str, argv: Sequence[str], *, marker: str, is_here: bool) -> None:
        """Start it.

        Raises:
            OSError: no process can be started.

        """
        self.host, self.is_here = host, is_here
        self.words: deque[str] = deque(maxlen=20)
        self.hello: dict[str, Any] = {}
        self.why = ""
        self.status: int | None = None
        self.on_words: Callable[[list[str]], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self._offset, self._round_trip = 0.0, float("inf")
        self._half_line = b""
        self._forgiven_at = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/" if is_here else None,
            env={**os.environ, "INSTEP_JOB": marker} if is_here else None,
            start_new_session=True,  # a terminal's Ctrl-C is for us, and ssh finds nobody to ask for a password
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno())

    @property
    def is_lost(self) -> bool:
        """Whether there is no agent any more."""
        return bool(self.why)

    @property
    def silent_at(self) -> float:
        """When the machine will count as lost unless something is heard."""
        return max(self.channel.heard_at, self._forgiven_at) + SILENT_S

    def forgive(self) -> None:
        """We were stopped ourselves: the silence begins now."""
        self._forgiven_at = time.monotonic()

    def descriptors(self) -> tuple[int, int]:
        """Readable when there is something to hear."""
        assert self.process.stderr
        return self.channel.source, self.process.stderr.fileno()

    def ask(self, kind: str, told: Any) -> None:
        """Tell the agent something."""
        if not self.is_lost:
            self.channel.send({kind: told})

    def ping(self) -> None:
        """Show that we live, and ask for its clock."""
        self.ask("ping", time.monotonic())

    def our_time(self, theirs: float) -> float:
        """A moment of the agent's monotonic clock by our own."""
        return theirs - self._offset

    def hear(self) -> list[dict[str, Any]]:
        """What has come, without waiting."""
        if self.is_lost:
            return []
        self._read_words()
        found = []
        for message in self.channel.receive():
            if "pong" in message:
                self._compare_clocks(*message["pong"])
            else:
                found.append(message)
        if self.channel.is_closed:
            self._ended()
        return found

    def _compare_clocks(self, sent: float, theirs: float) -> None:
        now = time.monotonic()
        if now - sent <= self._round_trip + _NO_WORSE_S:
            self._round_trip = min(self._round_trip, now - sent)
            self._offset = theirs - (sent + now) / 2

    def _read_words(self) -> None:
        assert self.process.stderr
        try:
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                *lines, self._half_line = (self._half_line + data).split(b"\n")
                said = [text for line in lines if (text := line.decode(errors="replace").rstrip())]
                self.words += said
                if self.on_words and said:
                    self.on_words(said)
        except (BlockingIOError, ValueError):
            pass

    def _ended(self) -> None:
        """The pipe has ended: ssh, or the agent, leaves."""
        with suppress(subprocess.TimeoutExpired):
            self.status = self.process.wait(1.0)
        self._read_words()
        if self.status and self.status < 0:
            how = f"was killed by {signal_name(-self.status)}"
            why = (
                f"the agent on {self.host} {how}"
                if self.is_here
                else f"the connection to {self.host} has ended: ssh {how}"
            )
        elif self.words and self.status == 255:  # ssh has something to say
            why = f"the connection to {self.host} has ended: {self.words[-1]}"
        else:
            why = f"the agent on {self.host} has ended"
        self.lose(why)

    def lose(self, why: str) -> None:
        """From now on there is no agent."""
        if not self.why:
            self.why = why
            self._stop()
            if self.on_lost:
                self.on_lost()

    def _stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                if pipe:
                    pipe.close()

    def look(self, now: float) -> None:
        """See whether it still lives, and send what could not be sent."""
        if self.is_lost:
            return
        self.channel.flush()
        if now >= self.silent_at:
            self.lose(f"{self.host} is out of reach: nothing was heard from it for {SILENT_S:g} s")

    def close(self, until: float) -> None:
        """End the agent, which was told so, by this moment at the latest."""
        if self.is_lost:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        self.why = "closed"
        self._stop()


class RemoteServer:
    """The ranks of one machine in one round; see :class:`instep.launch.ranks.server.Server`."""

    def __init__(self, connection: Connection, ranks: range) -> None:
        self.host, self.ranks = connection.host, ranks
        self._connection = connection
        self._heard: list[dict[str, Any]] = []
        self._guard: list[Sequence[Any]] = []
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether there is no agent any more."""
        return self._connection.is_lost

    @property
    def next_at(self) -> float | None:
        """When to see whether it still lives."""
        if self._is_lost:
            return None
        if self._heard:  # it came while the guard was listening
            return 0.0
        if self._connection.channel.waiting:
            return time.monotonic() + 0.05
        return self._connection.silent_at

    def descriptors(self) -> Sequence[int]:
        """Readable when there is something to hear."""
        return () if self._connection.is_lost else self._connection.descriptors()

    def tick(self, now: float) -> None:
        """See whether it still lives: what has come while we were busy is heard first."""
        self._heard += self._connection.hear()
        self._connection.look(now)

    def hear(self) -> Sequence[Mapping[str, Any]]:
        """What has come, without waiting; see :class:`instep.launch.ranks.server.Server`."""
        came, self._heard = self._heard + self._connection.hear(), []
        found = [translated for message in came if (translated := self._translate(message)) is not None]
        if self._connection.is_lost and not self._is_lost:
            self._is_lost = True
            status = self._connection.status if self._connection.is_here else None
            found.append({"lost": {"status": status, "why": self._connection.why}})
        return found

    def _translate(self, message: dict[str, Any]) -> dict[str, Any] | None:
        ((kind, told),) = message.items()
        if kind == "output":
            return {kind: {**told, "data": base64.b64decode(told["data"])}}
        if kind in {"ended", "report"}:
            return {kind: {**told, "time": self._connection.our_time(told["time"])}}
        if kind == "error":
            why = f"the agent on {self.host} failed: {told['what']}"
            self._connection.lose(why)
            return None
        if kind == "lost":
            self._is_lost = True
        elif kind == "guard":
            self._guard.append(told)
        return message if kind in {"started", "swept", "lost"} else None

    def take_guard(self) -> list[Sequence[Any]]:
        """What the guard's witness there has said; all that comes besides waits for :meth:`hear`."""
        for message in self._connection.hear():
            if "guard" in message:
                self._guard.append(message["guard"])
            else:
                self._heard.append(message)
        told, self._guard = self._guard, []
        return told

    def ask_guard(self, told: Sequence[Any]) -> None:
        """Tell the guard's witness something."""
        self._connection.ask("guard", told)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks, or to all of this machine."""
        self._connection.ask("signal", {"number": number, "ranks": ranks})

    def sweep(self, patience: float, kind: float) -> None:
        """End whatever the ranks left behind, and the fork server; the agent stays."""
        self._connection.ask("sweep", [patience, kind])

    def kill(self) -> None:
        """End all ranks at once; the agent says when they have gone."""
        self._connection.ask("kill", None)

    def end(self) -> None:
        """Nothing to wait for: the agent has ended the fork server before it said that all is swept."""


class Heart:
    """Shows all agents once a second that the launcher lives, also while it waits to write to a slow screen.

    While it is entered, Ctrl-Z first tells the agents: they would take the silence for the launcher's end.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._leaving = threading.Event()
        self._pause, self._paused, self._go_on = threading.Event(), threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._takes_stop = False

    def __enter__(self) -> Self:
        self._takes_stop = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._takes_stop:
            signal.signal(signal.SIGTSTP, self._stop)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._takes_stop:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._leaving.set()
        self._wake.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._leaving.is_set():
            if self._pause.is_set():
                self._pause.clear()
                self._tell_all("pause", on=True)
                self._paused.set()
                self._go_on.wait()
                self._go_on.clear()
                self._tell_all("pause", on=False)
            for connection in list(self.connections):
                connection.ping()
            self._wake.wait(PING_S)
            self._wake.clear()

    def _tell_all(self, kind: str, *, on: bool) -> None:
        for connection in list(self.connections):
            connection.ask(kind, on)

    def _stop(self, *_: FrameType | int | None) -> None:
        """Ctrl-Z. The thread sends: the main one may stand in the middle of sending itself."""
        self._pause.set()
        self._wake.set()
        self._paused.wait(1.0)
        self._paused.clear()
        os.kill(os.getpid(), signal.SIGSTOP)
        for connection in self.connections:
            connection.forgive()
        self._go_on.set()
