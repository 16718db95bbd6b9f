"""The launcher's end of the fork server: start it, talk to it, be rid of it."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from instep.launch import kin, zygote_path
from instep.launch.job import Job, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from instep.launch.target import Target

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


class ForkServer:
    """The process that forks the ranks."""

    def __init__(
        self,
        target: Target,
        *,
        world_size: int,
        port: int,
        marker: str,
        folder: Path,
        outputs: Sequence[tuple[int, int]],
        most_files: int,
        environ: Mapping[str, str],
    ) -> None:
        """Start it; it imports torch from now on, then forks.

        Raises:
            OSError: no process can be started.

        """
        self.control, far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports, far_reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        job = Job(
            kind=target.kind,
            name=target.name,
            arguments=target.arguments,
            world_size=world_size,
            port=port,
            marker=marker,
            folder=str(folder),
            report=far_reports.fileno(),
            outputs=tuple(outputs),
            most_files=most_files,
        )
        with far_control, far_reports:
            self.process = subprocess.Popen(
                [sys.executable, zygote_path(), str(far_control.fileno()), *target.words],
                # Rank 0 reads what is piped into `instep run`. A terminal stays ours: it belongs to one session.
                stdin=subprocess.DEVNULL if _is_terminal(0) else None,
                stdout=2,
                env=environ,
                pass_fds=[far_control.fileno(), far_reports.fileno(), *(one for pair in outputs for one in pair)],
                start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone
            )
        with suppress(OSError):  # it may have died; the closed socket will say so
            send(self.control, job.as_message())

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks, or to all: the server alone knows which of its pids are still theirs."""
        self._tell({"signal": number, "ranks": ranks})

    def sweep(self, patience: float, kind: float) -> None:
        """End whatever the ranks left behind, then the server itself: see :func:`instep.launch.kin.end_descendants`."""
        self._tell({"sweep": [patience, kind]})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            send(self.control, message)

    def hear(self) -> dict[str, Any] | None:
        """The next message, None where the server has gone."""
        return receive(self.control)

    def kill(self) -> int:
        """Kill the server and all its descendants, which come to the launcher; returns its status (-N: signal N)."""
        with suppress(OSError):
            self.process.kill()
        return self.end()

    def end(self) -> int:
        """Wait for the server, which is leaving, and end what has outlived it."""
        status = self.process.wait()
        kin.end_descendants(0, 0)
        return status


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
