"""What stands between the launcher and the ranks: on this machine the fork server. Start it, talk to it, end it."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from instep.launch.ranks import kin
from instep.launch.ranks.job import LARGEST, Job, receive, send, send_job
from instep.launch.running.failure import signal_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.planning.place import Place
    from instep.launch.planning.target import Target

_ZYGOTE = Path(__file__).with_name("zygote.py")  # started as a script: its command line shows the user's
_DESCRIPTORS_PER_RANK = 4
_DESCRIPTORS_BESIDES = 64


def raise_file_limit(world_size: int) -> int:
    """Make room for the pipes of many ranks; returns the soft limit of before, which the ranks get back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = world_size * _DESCRIPTORS_PER_RANK + _DESCRIPTORS_BESIDES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
    return soft


class Server(Protocol):
    """One machine's ranks, as the supervisor sees them.

    Attributes:
        host: the machine's name.
        ranks: those that are started there.

    """

    host: str
    ranks: range

    @property
    def next_at(self) -> float | None:
        """When :meth:`tick` has something to do, by the monotonic clock; None where only messages count."""

    def descriptors(self) -> Sequence[int]:
        """Readable when there is something to hear."""

    def tick(self, now: float) -> None:
        """Do what time asks for: show that we live, see whether the others do."""

    def hear(self) -> Sequence[Mapping[str, Any]]:
        """What has come, without waiting.

        Each message has one key: started: {rank: pid} · ended: {rank, status, time} · report: fields of an Event ·
        output: {rank, stream, data} · swept: [names] · lost: {status, why}, the last message of a server that is
        there no more: its ranks are gone, or out of reach and will be within seconds. Times are of the launcher's
        monotonic clock.
        """

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks, or to all of this machine."""

    def sweep(self, patience: float, kind: float) -> None:
        """End whatever the ranks left behind, then the server itself: see ``kin.end_descendants``."""

    def kill(self) -> None:
        """End the server and all its ranks at once."""

    def end(self) -> None:
        """Wait for the server, which is leaving, and see that nothing has outlived it."""


class ForkServer:
    """The process that forks the ranks of this machine."""

    ranks = range(0)

    def __init__(
        self, target: Target, *, host: str, environ: Mapping[str, str], cwd: str | None = None, reads_stdin: bool = True
    ) -> None:
        """Start it; it imports torch from now on, then forks, when it has been told the job.

        Args:
            target: the program.
            host: this machine's name.
            environ: of the ranks.
            cwd: their working folder; None: of this process.
            reads_stdin: whether rank 0 reads what is piped into this process.

        Raises:
            OSError: no process can be started.

        """
        self.host = host
        self._target = target
        self._is_lost = False
        self.control, far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports, far_reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._far_reports = far_reports.fileno()  # its number in the server
        with far_control, far_reports:
            numbers = [far_control.fileno(), far_reports.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, str(_ZYGOTE), *map(str, numbers), *target.words],
                # Rank 0 reads what is piped into `instep run`. A terminal stays ours: it belongs to one session.
                stdin=subprocess.DEVNULL if not reads_stdin or _is_terminal(0) else None,
                stdout=2,
                env=environ,
                cwd=cwd,
                pass_fds=numbers,
                start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone
            )

    def start(
        self,
        *,
        place: Place,
        port: int,
        marker: str,
        folder: Path,
        outputs: Sequence[tuple[int, int]],
        most_files: int,
        restarts: tuple[int, int] = (0, 0),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Tell it the job.

        Args:
            place: which ranks.
            port: where rank 0 listens.
            marker: the job's name in the environment of all its processes.
            folder: the run folder.
            outputs: (stdout, stderr) descriptors of each rank; may be closed here after the call.
            most_files: see :class:`instep.launch.ranks.job.Job`.
            restarts: how often the job has been started again, and how often it may be.
            variables: set for the ranks besides those that the server was started with.

        """
        self.ranks = place.ranks
        job = Job(
            kind=self._target.kind,
            name=self._target.name,
            arguments=self._target.arguments,
            place=place,
            port=port,
            marker=marker,
            folder=str(folder),
            report=self._far_reports,
            outputs=tuple(outputs),
            most_files=most_files,
            restart=restarts[0],
            max_restarts=restarts[1],
            variables=variables or {},
        )
        with suppress(OSError):  # it may have died; the closed socket will say so
            send_job(self.control, job)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks, or to all: the server alone knows which of its pids are still theirs."""
        self._tell({"signal": number, "ranks": ranks})

    def sweep(self, patience: float, kind: float) -> None:
        """End whatever the ranks left behind, then the server itself: see ``kin.end_descendants``."""
        self._tell({"sweep": [patience, kind]})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            send(self.control, message)

    next_at = None

    def descriptors(self) -> Sequence[int]:
        """Readable when there is something to hear."""
        return () if self._is_lost else (self.control.fileno(), self.reports.fileno())

    def tick(self, now: float) -> None:
        """It is a child: nothing has to be asked."""

    def hear(self) -> list[dict[str, Any]]:
        """What has come, without waiting; see :class:`Server`."""
        found: list[dict[str, Any]] = []
        while _is_readable(self.reports):
            found.append({"report": json.loads(self.reports.recv(LARGEST))})
        while not self._is_lost and _is_readable(self.control):
            message = receive(self.control)
            if message is None:
                self._is_lost = True
                self.end()
                message = {"lost": {"status": self.process.returncode, "why": self._why()}}
            found.append(message)
        return found

    def _why(self) -> str:
        status = self.process.returncode
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"left with exit code {status}"
        return f"the fork server on {self.host}, the parent of all ranks, {how}"

    def kill(self) -> None:
        """Kill the server and all its descendants, which come to the launcher."""
        with suppress(OSError):
            self.process.kill()
        self.end()

    def end(self) -> None:
        """Wait for the server, which is leaving, and end what has outlived it."""
        self.process.wait()
        kin.end_descendants(0, 0)


def _is_readable(channel: socket.socket) -> bool:
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
