"""The files between a rank and the watch, in the folder of the job.

    ask              how often the watch has asked for snapshots: 8 bytes
    rank-N.beat      the last two signs of life, mapped into the rank's memory: a rank that is stopped, killed or holds
                     the interpreter's lock leaves them as they are, and the last whole one counts
    rank-N.snapshot  the last snapshot: a line of JSON, then torch's flight recorder as it comes; written beside, then
                     renamed
    rank-N.stacks    all threads' stacks, appended when STACKS_SIGNAL comes, without the interpreter's lock
    rank-N.fatal     the same, written when a signal such as SIGABRT or SIGSEGV ends the rank
    rank-N.end       once it is there, the rank shall leave

A beat lies in one of two places, in turn: its number, its length, a checksum, then what marshal makes of it. A reader
takes the one with the higher number whose checksum is right, so it never sees half a beat.
"""

from __future__ import annotations

import json
import marshal
import mmap
import os
import re
import signal
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from instep.guard import flight, positions
from instep.guard.records import Beat, Frame, Group, Op, Raised, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from instep.guard.positions import Places

STACKS_SIGNAL = signal.SIGRTMIN + 5

_MAGIC = b"instep-1"
_FILE = struct.Struct("<8sI")  # magic, bytes of one place
_PLACE = struct.Struct("<QII")  # number, length, checksum
_FIRST_PLACE_BYTES = 16 * 1024
_COUNT = struct.Struct("<Q")
_MAIN_THREAD = "main thread 0x%016x\n"

# What beats are made of: (file, line, function, user, lasti) and (name, members, asked).
RawFrame = tuple[str, int, str, bool, int]
RawGroup = tuple[str, tuple[int, ...], int]


def beat_path(folder: Path, rank: int) -> Path:
    """The file of a rank's beats."""
    return folder / f"rank-{rank}.beat"


def snapshot_path(folder: Path, rank: int) -> Path:
    """The file of a rank's last snapshot."""
    return folder / f"rank-{rank}.snapshot"


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks when STACKS_SIGNAL comes; truncate it first."""
    return folder / f"rank-{rank}.stacks"


def fatal_path(folder: Path, rank: int) -> Path:
    """Where a rank's last stacks are when a signal has ended it."""
    return folder / f"rank-{rank}.fatal"


class BeatWriter:
    """The rank's side of its file of beats."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = beat_path(folder, rank)
        self._rank = rank
        self._pid = os.getpid()
        self.count = 0
        self._place_bytes = 0
        self._map: mmap.mmap | None = None
        self._enlarge(_FIRST_PLACE_BYTES)

    def write(
        self, time_s: float, groups: Sequence[RawGroup], stack: Sequence[RawFrame], still_s: float, ended: str | None
    ) -> None:
        """Put a beat into the older one's place."""
        self.count += 1
        beat = (self._rank, self._pid, self.count, time_s, tuple(groups), tuple(stack), still_s, ended)
        payload = marshal.dumps(beat)
        if len(payload) > self._place_bytes - _PLACE.size:
            self._enlarge(2 * len(payload))
        if self._map is None:
            return
        at = _FILE.size + self._place_bytes * (self.count % 2)
        checksum = zlib.crc32(payload, self.count & 0xFFFFFFFF)
        self._map[at + _PLACE.size : at + _PLACE.size + len(payload)] = payload
        _PLACE.pack_into(self._map, at, self.count, len(payload), checksum)

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _enlarge(self, place_bytes: int) -> None:
        """A new file with larger places, renamed over the old one: readers open it again each time."""
        beside = self._path.with_suffix(".beat-new")
        size = _FILE.size + 2 * place_bytes
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            new = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        _FILE.pack_into(new, 0, _MAGIC, place_bytes)
        old, self._map, self._place_bytes = self._map, new, place_bytes
        beside.replace(self._path)
        if old is not None:
            old.close()


def read_beat(folder: Path, rank: int) -> Beat | None:
    """A rank's last whole sign of life; None before the first."""
    for _ in range(3):  # a writer may come between: the next look finds the other place whole
        try:
            data = beat_path(folder, rank).read_bytes()
        except OSError:
            return None
        if raw := _last_whole(data):
            return _beat(raw)
    return None


def _last_whole(data: bytes) -> tuple[Any, ...] | None:
    if len(data) < _FILE.size or not data.startswith(_MAGIC):
        return None
    _, place_bytes = _FILE.unpack_from(data)
    found: list[tuple[int, bytes]] = []
    for at in (_FILE.size, _FILE.size + place_bytes):
        if at + _PLACE.size > len(data):
            continue
        number, length, checksum = _PLACE.unpack_from(data, at)
        payload = data[at + _PLACE.size : at + _PLACE.size + length]
        if number and zlib.crc32(payload, number & 0xFFFFFFFF) == checksum:
            found.append((number, payload))
    if not found:
        return None
    raw: tuple[Any, ...] = marshal.loads(max(found)[1])  # noqa: S302  # our own file, in a folder of our own
    return raw


def _beat(raw: Sequence[Any]) -> Beat:
    rank, pid, count, time_s, groups, stack, still_s, ended = raw
    return Beat(
        rank,
        pid,
        count,
        time_s,
        tuple(Group(name, tuple(members), asked) for name, members, asked in groups),
        tuple(Frame(file, line, function, user, {}, lasti) for file, line, function, user, lasti in stack),
        still_s,
        ended,
    )


def ask(folder: Path) -> int:
    """Ask all ranks for a snapshot.

    Returns:
        How often that was done. Who has answered, has a snapshot whose beat is younger.

    """
    with open(folder / "ask", "a+b") as file:  # noqa: PTH123  # one writer: the watch
        descriptor = file.fileno()
        count = _count(os.pread(descriptor, _COUNT.size, 0)) + 1
    descriptor = os.open(folder / "ask", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _COUNT.pack(count), 0)
    finally:
        os.close(descriptor)
    return count


class Asked:
    """The rank's side of the file "ask": looked at without a system call."""

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / "ask", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _COUNT.size:
                os.ftruncate(descriptor, _COUNT.size)  # what is there stays: several ranks may do this
            self._map = mmap.mmap(descriptor, _COUNT.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def count(self) -> int:
        """How often the watch has asked."""
        return _count(self._map[: _COUNT.size])

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()


def _count(data: bytes) -> int:
    count: int = _COUNT.unpack(data)[0] if len(data) == _COUNT.size else 0
    return count


def order_end(folder: Path, rank: int, at_s: float) -> None:
    """Tell a rank's recorder to end its process with the exit code of ranks out of step.

    Args:
        folder: of the job.
        rank: of the world.
        at_s: when, by the monotonic clock: later than all recorders have seen the order.

    """
    path = end_path(folder, rank)
    beside = path.with_suffix(".end-new")
    with suppress(OSError):
        beside.write_text(repr(at_s))
        beside.replace(path)


def end_path(folder: Path, rank: int) -> Path:
    """The file whose presence is that order."""
    return folder / f"rank-{rank}.end"


def write_snapshot(folder: Path, snapshot: Snapshot, flown: bytes = b"", places: Places | None = None) -> None:
    """Write a rank's snapshot so that a reader sees the old one or the new one.

    Args:
        folder: of the job.
        snapshot: without operations where the flight recorder's come from `flown`.
        flown: a dump of torch's flight recorder, unpacked by the reader.
        places: of this rank, by which the reader tells the user's files there.

    """
    path = snapshot_path(folder, snapshot.beat.rank)
    beside = path.with_suffix(f".snapshot-{os.getpid()}")
    with open(beside, "wb", buffering=0) as file:  # noqa: PTH123
        file.write(dump_snapshot(snapshot, places).encode() + b"\n" + flown)
    beside.replace(path)


def read_snapshot(folder: Path, rank: int) -> Snapshot | None:
    """A rank's last snapshot; None if there was none."""
    try:
        head, _, flown = snapshot_path(folder, rank).read_bytes().partition(b"\n")
        return load_snapshot(head.decode(), flown)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


class _Frames:
    """Frames and stacks, each written once: a step's collectives come from the same places as the last step's."""

    def __init__(self) -> None:
        self.frames: dict[RawFrame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def stack(self, frames: Iterable[Frame]) -> int:
        numbers = tuple(
            self.frames.setdefault((one.file, one.line, one.function, one.user, one.lasti), len(self.frames))
            for one in frames
        )
        return self.stacks.setdefault(numbers, len(self.stacks))


def dump_snapshot(snapshot: Snapshot, places: Places | None = None) -> str:
    """A snapshot as a line of JSON."""
    table = _Frames()
    # DDP's buckets come from the same tuple of frames again and again: looked up by identity first.
    known: dict[int, int] = {}

    def number(frames: tuple[Frame, ...]) -> int:
        found = known.get(id(frames))
        if found is None:
            found = known[id(frames)] = table.stack(frames)
        return found

    def raised(one: Raised) -> list[Any]:
        return [one.kind, one.text, number(one.frames), [frame.values for frame in one.frames]]

    beat = snapshot.beat
    told = {
        "beat": [
            *(beat.rank, beat.pid, beat.count, beat.time_s),
            [[one.name, one.members, one.asked] for one in beat.groups],
            [[one.file, one.line, one.function, one.user, one.lasti] for one in beat.stack],
            *(beat.still_s, beat.ended),
        ],
        "ops": [
            [op.group, op.index, op.kind, op.sizes, op.dtypes, op.done, number(op.frames), op.time_ns, op.root]
            for op in snapshot.ops
        ],
        "stack": [number(snapshot.stack), [frame.values for frame in snapshot.stack]],
        "handled": [raised(one) for one in snapshot.handled],
        "last_raised": raised(snapshot.last_raised) if snapshot.last_raised else None,
        "facts": snapshot.facts,
    }
    if places is not None:
        told["places"] = [places.folder, places.not_users]
    told["frames"] = list(table.frames)
    told["stacks"] = list(table.stacks)
    return json.dumps(told, separators=(",", ":"))


def load_snapshot(text: str, flown: bytes = b"") -> Snapshot:
    """A snapshot from its JSON and a dump of the flight recorder.

    Raises:
        ValueError, KeyError, IndexError, TypeError: it is something else.

    """
    told = json.loads(text)
    frames = [Frame(file, line, function, user, {}, lasti) for file, line, function, user, lasti in told["frames"]]
    stacks = [tuple(frames[one] for one in numbers) for numbers in told["stacks"]]

    def with_values(number: int, values: Sequence[dict[str, str]]) -> tuple[Frame, ...]:
        return tuple(
            Frame(one.file, one.line, one.function, one.user, known, one.lasti)
            for one, known in zip(stacks[number], values, strict=True)
        )

    def raised(one: list[Any]) -> Raised:
        kind, message, number, values = one
        return Raised(kind, message, with_values(number, values))

    beat = _beat(told["beat"])
    stack = with_values(*told["stack"])
    if flown:
        ops = flight.ops_in(flown, positions.Places(*told["places"]).of_file, stack, beat.groups)
    else:
        ops = tuple(
            Op(group, index, kind, tuple(map(tuple, sizes)), tuple(dtypes), done, stacks[number], time_ns, root)
            for group, index, kind, sizes, dtypes, done, number, time_ns, root in told["ops"]
        )
    if beat.ended:
        beat = replace(beat, groups=flight.left(beat.groups, ops))
    return Snapshot(
        beat,
        ops,
        stack,
        tuple(map(raised, told["handled"])),
        raised(told["last_raised"]) if told["last_raised"] else None,
        told["facts"],
    )


def mark_main_thread(folder: Path, rank: int, ident: int) -> None:
    """Begin the files of stacks with the main thread's number: faulthandler does not tell which one it is."""
    for path in (stacks_path(folder, rank), fatal_path(folder, rank)):
        path.write_text(_MAIN_THREAD % ident)


def clear_stacks(folder: Path, rank: int) -> None:
    """Empty the file of stacks but for its head, before STACKS_SIGNAL is sent."""
    with suppress(OSError):
        os.truncate(stacks_path(folder, rank), len(_MAIN_THREAD % 0))


def read_stacks(folder: Path, rank: int) -> str:
    """What STACKS_SIGNAL made a rank write; "" if nothing."""
    return _without_head(stacks_path(folder, rank))


def read_fatal(folder: Path, rank: int) -> str:
    """The stacks that a rank wrote when a signal ended it: for its log, and for the report; "" if none did."""
    return _without_head(fatal_path(folder, rank))


def _without_head(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text[len(_MAIN_THREAD % 0) :] if text.startswith("main thread") else text


def main_stack(path: Path) -> tuple[tuple[str, int, str], ...]:
    """The main thread's stack in a file of stacks: (file, line, function), innermost first; () if it has none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    head = re.match(r"main thread (0x[0-9a-f]+)", text)
    return stack_in_text(text, head.group(1) if head else None)


def stack_in_text(text: str, thread: str | None = None) -> tuple[tuple[str, int, str], ...]:
    """The main thread's stack in what faulthandler has written, perhaps among other lines.

    Args:
        text: from a file of stacks or a log.
        thread: as faulthandler writes it ("0x..."); without it the last thread is taken, which is Python's first.

    """
    threads = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*$", text, flags=re.MULTILINE)
    found: tuple[tuple[str, int, str], ...] = ()
    for ident, lines in zip(threads[1::2], threads[2::2], strict=False):
        if thread is not None and int(ident, 16) != int(thread, 16):
            continue
        places = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', lines, flags=re.MULTILINE)
        found = tuple((file, int(line), function) for file, line, function in places)
    return found
