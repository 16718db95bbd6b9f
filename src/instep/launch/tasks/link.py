"""A connection between the launcher and a process that mpirun or srun has started for it: JSON lines, both ways.

Whoever connects shows that it knows the job's key, and is shown the same, before anything else is said. Whether the
other machine is still there is asked of the kernel, not of the process: one that was stopped (Ctrl-Z) is not lost.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SILENT_S = 5.0  # a machine that has not answered for so long is lost
FULL = 1 << 20  # bytes that wait to be sent: from here on the ranks' output has to wait, too
_CHUNK = 1 << 16
_LONGEST_GREETING = 1 << 12
_GREETING_S = 3.0
_INFO = struct.Struct("=8B24I")  # the first part of struct tcp_info, see tcp(7)
_UNACKED, _LAST_ACK_RECEIVED = 8 + 4, 8 + 12


class Link:
    """One end.

    Attributes:
        is_closed: the other end has gone, or its machine has.
        why: what the kernel says of that, "" for a proper end.

    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._in = b""
        self._out = bytearray()
        self._unread: list[dict[str, Any]] = []
        self.is_closed = False
        self.why = ""

    def fileno(self) -> int:
        """Readable when something has come."""
        return self._connection.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that are still to be sent."""
        return len(self._out)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; what does not go at once goes with :meth:`flush`."""
        if not self.is_closed:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(error)

    def receive(self, *, longest: int = 0) -> list[dict[str, Any]]:
        """The messages that have come.

        Args:
            longest: close a connection that sends more at once; 0: any length will do.

        """
        try:
            while data := self._connection.recv(_CHUNK):
                self._in += data
                if longest and len(self._in) > longest:
                    break
            self._close(None)
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(error)
        *lines, self._in = self._in.split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # not one of ours
                self._close(None)
        before, self._unread = self._unread, []
        return before + [message for message in found if isinstance(message, dict)]

    def next(self, limit_s: float) -> dict[str, Any]:
        """The next message alone, waited for; an empty one where none comes."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        end = time.monotonic() + limit_s
        while not self.is_closed and time.monotonic() < end:
            if poll.poll(100) and (found := self.receive(longest=_LONGEST_GREETING)):
                first, *self._unread = found
                return first
        return {}

    def look(self) -> None:
        """Close it where the other machine has not acknowledged for too long what was sent to it.

        While nothing is under way the kernel's keep-alive finds that out; while something is, it would take minutes.
        """
        if not self.is_closed:
            info = _INFO.unpack(self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
            if info[_UNACKED] and info[_LAST_ACK_RECEIVED] > SILENT_S * 1000:
                self._close(TimeoutError(f"no answer for {SILENT_S:g} s"))

    def _close(self, error: OSError | None) -> None:
        """The descriptor stays until :meth:`close`: somebody's selector has it."""
        if not self.is_closed:
            self.why = (error.strerror or str(error)) if error else ""
        self.is_closed = True
        self._out.clear()

    def close(self) -> None:
        """Hang up."""
        self._close(None)
        self._connection.close()

    @property
    def is_silent(self) -> bool:
        """Whether it was closed because the other machine does not answer."""
        return bool(self.why) and self.why not in {os.strerror(errno.ECONNRESET), os.strerror(errno.EPIPE)}


# ---- who may talk to whom


def new_key() -> str:
    """What both ends of a job's connections know."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """Something that was never said before."""
    return secrets.token_hex(16)


def proof(key: str, side: str, nonce: str) -> str:
    """That one knows the key, for who has said the nonce. Each side has proofs of its own: none can be sent back."""
    return hmac.new(key.encode(), f"{side} {nonce}".encode(), hashlib.sha256).hexdigest()


def is_proof(said: object, key: str, side: str, nonce: str) -> bool:
    """Whether this is the right proof."""
    return isinstance(said, str) and hmac.compare_digest(said.encode(), proof(key, side, nonce).encode())


class Greeting:
    """The launcher's part: one new connection, until it is known who is there."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        self.link = Link(connection)
        self.since = time.monotonic()
        self._key = key
        self._nonce = new_nonce()
        self.link.send({"nonce": self._nonce})

    def hear(self) -> dict[str, Any] | None:
        """What the other says of itself, once it has shown that it knows the key."""
        for message in self.link.receive(longest=_LONGEST_GREETING):
            if is_proof(message.get("proof"), self._key, "task", self._nonce):
                self.link.send({"proof": proof(self._key, "launcher", str(message.get("nonce")))})
                return message
            self.link.close()
            break
        return None


def connect(
    addresses: Sequence[tuple[str, int]], key: str, hello: Mapping[str, Any], limit_s: float
) -> tuple[Link | None, dict[str, str]]:
    """The other part: try all addresses of the launcher at once, and take the first that knows the key.

    Returns:
        the connection, None where nobody answers; and why each address did not serve.

    """
    trying: dict[int, tuple[socket.socket, str]] = {}
    whys: dict[str, str] = {}
    poll = select.poll()
    for address, port in addresses:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        with suppress(BlockingIOError):
            try:
                connection.connect((address, port))
            except BlockingIOError:
                raise
            except OSError as error:
                whys[address] = error.strerror or str(error)
                connection.close()
                continue
        trying[connection.fileno()] = (connection, address)
        poll.register(connection, select.POLLOUT)
    end = time.monotonic() + limit_s
    while trying and (left := end - time.monotonic()) > 0:
        for number, event in poll.poll(left * 1000):
            connection, address = trying[number]
            if event == select.POLLOUT:  # connected: the launcher speaks first, and a stranger may never do so
                poll.modify(number, select.POLLIN)
                continue
            poll.unregister(number)
            del trying[number]
            link, whys[address] = _greet(connection, key, hello)
            if link:
                for other, _ in trying.values():
                    other.close()
                return link, whys
    for connection, address in trying.values():
        whys[address] = "no answer"
        connection.close()
    return None, whys


def _greet(connection: socket.socket, key: str, hello: Mapping[str, Any]) -> tuple[Link | None, str]:
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        connection.close()
        return None, os.strerror(error)
    link = Link(connection)
    nonce = new_nonce()
    said = link.next(_GREETING_S)
    link.send({**hello, "proof": proof(key, "task", str(said.get("nonce"))), "nonce": nonce})
    if is_proof(link.next(_GREETING_S).get("proof"), key, "launcher", nonce):
        return link, ""
    link.close()
    return None, "another one answers there"
