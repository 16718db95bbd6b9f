"""What the launcher tells the fork server, and what comes back: JSON messages over inherited sockets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from instep.launch.place import Place

if TYPE_CHECKING:
    import socket

LARGEST = 1 << 17  # bytes of one message; a Unix socket takes 200 kB unless root says otherwise


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
        outputs: (stdout, stderr) descriptors of each rank that is started here.
        most_files: the user's soft limit on open files, which the launcher may have raised for itself.
        restart: how often the job has been started again.
        max_restarts: how often it may be.

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


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, or None where the other side has gone."""
    try:
        data = channel.recv(LARGEST)
    except ConnectionError:
        return None
    return json.loads(data) if data else None
