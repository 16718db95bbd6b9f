"""The channel between the side-cars of a job's nodes: messages of JSON, each behind its length, over TCP.

    leaf -> hub   {"who": ...}, {"now", "beats", "codes"}, {"now", "answer", "views"}, {"stacks": texts}
    hub -> leaf   {"who": ...}, {"ask": number}, {"stacks": true}, {"end": ranks}

Who does not know the job's token is not listened to.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from instep.guard import storage
from instep.guard.processes import LAST_WORDS
from instep.guard.records import Beat, Frame, Group, Process, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 256 * 1024 * 1024
_MOST_BYTES_OF_STRANGERS = 4096
_SEND_S = 2.0
_CONNECT_S = 3.0
_STRANGER_S = 5.0
_STACKS_S = 0.8
_STILL_S = 0.4  # of a rank that moves only the user's line is told


class LostError(Exception):
    """The other side has gone, or speaks nonsense."""


class Line(Protocol):
    """What messages travel on."""

    def fileno(self) -> int:
        """For poll."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, or raise :class:`LostError`."""

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting; :class:`LostError` once the other side has gone and nothing is left."""

    def close(self) -> None:
        """End it."""


class Link:
    """One connection over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._got = bytearray()
        self._is_known = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send.

        Raises:
            LostError: nobody takes it.

        """
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._socket.settimeout(_SEND_S)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
            self._socket.setblocking(False)
        except OSError as error:
            raise LostError(str(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting; of a stranger one message at most.

        Raises:
            LostError: the other side has gone; what came before that is given first.

        """
        has_ended = self._read()
        found: list[dict[str, Any]] = []
        while (self._is_known or not found) and (text := self._next()) is not None:
            try:
                message = json.loads(text)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise LostError("no message")
            found.append(message)
        if has_ended and not found:
            raise LostError("the connection has ended")
        return found

    def _read(self) -> bool:
        """Take what is there. Whether that was all for ever."""
        most = _MOST_BYTES if self._is_known else _MOST_BYTES_OF_STRANGERS
        while len(self._got) <= most + _LENGTH.size:
            try:
                data = self._socket.recv(1 << 20 if self._is_known else 4096)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._got += data
        return False

    def _next(self) -> bytes | None:
        if len(self._got) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._got)
        if length > (_MOST_BYTES if self._is_known else _MOST_BYTES_OF_STRANGERS):
            raise LostError("too long a message")
        end = _LENGTH.size + length
        if len(self._got) < end:
            return None
        text = bytes(self._got[_LENGTH.size : end])
        del self._got[:end]
        return text

    def trust(self) -> None:
        """The other side has shown that it knows the token."""
        self._is_known = True

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _proof(token: str, side: str) -> str:
    """What only who has the token can say."""
    return hashlib.sha256(f"{side} {token}".encode()).hexdigest()


def _knows(message: Mapping[str, Any], token: str, side: str) -> bool:
    return hmac.compare_digest(str(message.get("who")).encode(), _proof(token, side).encode())


def connect(places: Sequence[Sequence[Any]], token: str, first_rank: int) -> Link | None:
    """The link of a leaf to its hub; None where it is at none of these places.

    Args:
        places: (name, port), tried in turn.
        token: the job's.
        first_rank: of this node: says which one it is.

    """
    for name, port in places:
        link = None
        with suppress(OSError, LostError):
            link = Link(socket.create_connection((name, port), _CONNECT_S))
            link.send({"who": _proof(token, "leaf"), "first_rank": first_rank})
            deadline = time.monotonic() + _CONNECT_S
            while time.monotonic() < deadline:
                if any(_knows(message, token, "hub") for message in link.receive()):
                    link.trust()
                    return link
                time.sleep(0.02)
        if link is not None:
            link.close()
    return None


class Remote:
    """A node, as its leaf tells of it: a ``Node`` of the watch.

    Args:
        host: its name.
        ranks: of the world.

    Attributes:
        codes: exit codes of the ranks that have ended.
        stacks: texts of all ranks, once they were asked for and have come.
        is_lost: the leaf has gone before its ranks have.
        told_at: when it last gave signs of life, by the monotonic clock; 0 before.
        last_words: the end of what a rank has written.

    """

    def __init__(self, host: str, ranks: Sequence[int]) -> None:
        self.host, self.ranks = host, tuple(ranks)
        self.beats: dict[int, Beat] = {}
        self.codes: dict[int, int | None] = {}
        self.stacks: dict[int, str] | None = None
        self.is_lost = False
        self.told_at = 0.0
        self.last_words: Callable[[int], str] = lambda _: ""
        self.link: Line | None = None
        self._views: dict[int, View] = {}
        self._viewed_at = 0.0
        self._asked = self._answer = 0

    @property
    def has_ended(self) -> bool:
        """Whether all its ranks have."""
        return len(self.codes) == len(self.ranks)

    @property
    def has_answered(self) -> bool:
        """Whether it has answered the last question, or cannot."""
        return self.link is None or self._answer == self._asked

    def ask(self) -> None:
        """Have all ranks asked for snapshots."""
        self._asked += 1
        self.send({"ask": self._asked})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, if there is anybody."""
        if self.link is not None:
            try:
                self.link.send(message)
            except LostError:
                self._lose()

    def pump(self) -> None:
        """Take what has come."""
        try:
            while self.link is not None and (messages := self.link.receive()):
                for message in messages:
                    self._take(message)
        except (LostError, KeyError, TypeError, ValueError, IndexError, AttributeError):
            self._lose()

    def views(self, exit_codes: Mapping[int, int | None]) -> tuple[View, ...]:
        """What is known of each rank now."""
        now = time.monotonic()
        since = max(0.0, now - self._viewed_at)
        found = []
        for rank in self.ranks:
            view = self._views.get(rank, View(rank, self.host, Process(alive=True)))
            beat, process = self.beats.get(rank), view.process
            if view.beat is not None and (beat is None or beat.count <= view.beat.count):
                beat = view.beat
            if rank in exit_codes and process.alive:
                process = Process(alive=False, exit_code=exit_codes[rank])
            if not process.alive and process.exit_code != 0 and not process.last_words:
                process = replace(process, last_words=self.last_words(rank)[-LAST_WORDS:])
            silent = max(0.0, now - beat.time_s) if beat else 0.0
            age = view.age_s + since if view.snapshot else 0.0
            found.append(replace(view, process=process, age_s=age, beat=beat, silent_s=silent))
        return tuple(found)

    def _lose(self) -> None:
        self.is_lost = self.is_lost or not self.has_ended
        if self.link is not None:
            self.link.close()
            self.link = None

    def _take(self, message: dict[str, Any]) -> None:
        if "now" in message:
            self.told_at = time.monotonic()
            shift = self.told_at - float(message["now"])
            for told in message.get("beats", ()):
                beat = _beat(told, shift)
                self.beats[beat.rank] = beat
            self.codes |= {int(rank): code for rank, code in message.get("codes", {}).items()}
            if "views" in message:
                self._views = {view.rank: view for view in (_view(told, shift) for told in message["views"])}
                self._viewed_at = time.monotonic()
                self._answer = int(message["answer"])
        if "stacks" in message:
            self.stacks = {int(rank): str(text) for rank, text in message["stacks"].items()}


def ask_stacks(remotes: Sequence[Remote]) -> None:
    """Have all ranks of these nodes write their stacks."""
    for remote in remotes:
        remote.stacks = None
        remote.send({"stacks": True})


def take_stacks(remotes: Sequence[Remote]) -> dict[int, str]:
    """The stacks that were asked for, waited for a moment."""
    deadline = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline and any(one.link and one.stacks is None for one in remotes):
        time.sleep(0.02)
        for remote in remotes:
            remote.pump()
    return {rank: text for remote in remotes for rank, text in (remote.stacks or {}).items()}


class Hub:
    """Node 0's end of all links.

    Args:
        listener: where the leaves come.
        token: the job's.
        remotes: the other nodes.

    """

    def __init__(self, listener: socket.socket, token: str, remotes: Sequence[Remote]) -> None:
        self._listener = listener
        self._token = token
        self._remotes = remotes
        self._strangers: list[tuple[Link, float]] = []
        listener.setblocking(False)

    def descriptors(self) -> list[int]:
        """For poll."""
        links = [one.link for one in self._remotes if one.link is not None]
        strangers = [link for link, _ in self._strangers]
        return [self._listener.fileno(), *(link.fileno() for link in [*links, *strangers])]

    def pump(self) -> None:
        """Let those in who know the token, and take what has come."""
        now = time.monotonic()
        with suppress(OSError):
            while len(self._strangers) < len(self._remotes) + 16:
                self._strangers.append((Link(self._listener.accept()[0]), now))
        left = []
        for link, since in self._strangers:
            try:
                messages = link.receive()
                if not messages and now < since + _STRANGER_S:
                    left.append((link, since))
                elif not messages or not self._welcome(link, messages[0]):
                    link.close()
            except LostError:
                link.close()
        self._strangers = left
        for remote in self._remotes:
            remote.pump()

    def _welcome(self, link: Link, message: dict[str, Any]) -> bool:
        if not _knows(message, self._token, "leaf"):
            return False
        for remote in self._remotes:
            if remote.ranks[0] == message.get("first_rank") and remote.link is None and not remote.is_lost:
                link.trust()
                link.send({"who": _proof(self._token, "hub")})
                remote.link = link
                return True
        return False


# What travels


def beats_message(beats: Mapping[int, Beat], codes: Mapping[int, int | None]) -> dict[str, Any]:
    """The signs of life of a node; of a rank that moves without the stack but for the user's line."""
    told = []
    for beat in beats.values():
        stack = beat.stack if beat.still_s >= _STILL_S else tuple(one for one in beat.stack if one.user)[:1]
        told.append(asdict(replace(beat, stack=stack)))
    return {"now": time.monotonic(), "beats": told, "codes": {str(rank): code for rank, code in codes.items()}}


def views_message(folder: Path, views: Sequence[View], answer: int) -> dict[str, Any]:
    """The views of a node's ranks; their snapshots travel as they lie in the folder."""
    told = []
    for view in views:
        head, flown = "", b""
        if view.snapshot is not None:
            with suppress(OSError, UnicodeDecodeError):
                line, _, flown = storage.snapshot_path(folder, view.rank).read_bytes().partition(b"\n")
                head = line.decode()
        told.append(
            {
                "rank": view.rank,
                "host": view.host,
                "process": asdict(view.process),
                "age_s": view.age_s,
                "silent_s": view.silent_s,
                "beat": asdict(view.beat) if view.beat else None,
                "snapshot": head,
                "flown": base64.b64encode(flown).decode(),
            }
        )
    return {"now": time.monotonic(), "answer": answer, "views": told}


def _beat(told: Mapping[str, Any], shift: float) -> Beat:
    groups = tuple(Group(**{**one, "members": tuple(one["members"])}) for one in told["groups"])
    stack = tuple(Frame(**one) for one in told["stack"])
    return Beat(**{**told, "groups": groups, "stack": stack, "time_s": told["time_s"] + shift})


def _view(told: Mapping[str, Any], shift: float) -> View:
    snapshot = None
    if told["snapshot"]:
        snapshot = storage.load_snapshot(told["snapshot"], base64.b64decode(told["flown"]))
        snapshot = replace(snapshot, beat=replace(snapshot.beat, time_s=snapshot.beat.time_s + shift))
    return View(
        int(told["rank"]),
        str(told["host"]),
        Process(**told["process"]),
        snapshot,
        float(told["age_s"]),
        _beat(told["beat"], shift) if told["beat"] else None,
        float(told["silent_s"]),
    )
