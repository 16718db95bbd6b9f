"""What the launcher tells the fork server, and what comes back: JSON messages over inherited sockets."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from instep.launch.planning.place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LARGEST = 1 << 17  # bytes of one message; a Unix socket takes 200 kB unless root says otherwise
_TOGETHER = 200  # descriptors in one message; Linux takes 253


@dataclass(frozen=True)
class Job:
    """All that the fork server needs to start the ranks.

    Attributes:
        kind: "script", "folder" or "module".
        name: the path or module as typed.
        arguments: what follows it.
        place: which ranks.
        port: where rank 0 listens.
        marker: the job's name in the environment of all its processes.
        folder: the run folder.
        report: descriptor on which a rank reports the exception that escaped from it.
        outputs: (stdout, stderr) descriptors of each rank that is started here; they come with the job.
        most_files: the user's soft limit on open files, which the launcher may have raised for itself.
        restart: how often the job has been started again.
        max_restarts: how often it may be.
        variables: set for the ranks; what has to be set before torch is imported, the server was started with.

    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    place: Place
    port: int
    marker: str
    folder: str
    report: int
    outputs: tuple[tuple[int, int], ...]
    most_files: int
    restart: int = 0
    max_restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_message(self) -> dict[str, Any]:
        """For :func:`send`."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Job:
        """What :meth:`as_message` gave."""
        outputs = tuple((out, err) for out, err in message["outputs"])
        place = Place(**message["place"])
        return cls(**{**message, "arguments": tuple(message["arguments"]), "outputs": outputs, "place": place})


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: nobody is there any more.

    """
    channel.send(json.dumps(message).encode())


def send_job(channel: socket.socket, job: Job) -> None:
    """Send a job, and its descriptors before it.

    Raises:
        OSError: nobody is there any more.

    """
    ends = [end for pair in job.outputs for end in pair]
    for first in range(0, len(ends), _TOGETHER):
        socket.send_fds(channel, [b"{}"], ends[first : first + _TOGETHER])
    send(channel, job.as_message())


def receive_job(channel: socket.socket) -> Job | None:
    """What :func:`send_job` sent, with descriptors of this process; None where the other side has gone."""
    ends: list[int] = []
    while True:
        try:
            data, more, _, _ = socket.recv_fds(channel, LARGEST, _TOGETHER)
        except ConnectionError:
            return None
        if not data:
            return None
        for end in more:
            os.set_inheritable(end, False)
        ends += more
        if message := json.loads(data):
            return Job.from_message({**message, "outputs": _pairs(ends)})


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ends[::2], ends[1::2], strict=True))


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, or None where the other side has gone."""
    try:
        data = channel.recv(LARGEST)
    except ConnectionError:
        return None
    return json.loads(data) if data else None
