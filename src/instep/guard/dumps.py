"""Dumps of torch's flight recorder, one file a rank, of a job that instep need not have started."""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.guard.flight import ops_of
from instep.guard.positions import Places
from instep.guard.records import Beat, Frame, Group, Op, Process, Snapshot, View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NAME = re.compile(r"(\d+)(?:\.(?:pkl|pickle|bin|dump|pt))?$")  # trace_rank_3, dump3, rank-3.pkl
_PYTHONS = re.compile(r"/lib/python3\.\d+/")
_MOST_BYTES = 1 << 30
_CURE = (
    "set TORCH_FR_DUMP_TEMP_FILE=FOLDER/rank_ in all ranks of the job, or write "
    "torch._C._distributed_c10d._dump_fr_trace() into FOLDER/rank_N"
)


class _PlainOnly(pickle.Unpickler):
    """Numbers, texts, lists and dicts: a file from elsewhere may not name anything to be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, where only plain values belong")


def find(folder: Path) -> dict[int, Path]:
    """The files that look like dumps, by rank.

    Raises:
        RunError: two files for one rank.

    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        name = _NAME.search(path.name)
        if not name or not path.is_file() or path.name.startswith("."):
            continue
        rank = int(name[1])
        if rank in found:
            raise RunError(
                f"two files for rank {rank} in {folder}",
                evidence=[found[rank].name, path.name],
                cure="keep the dumps of one job, made at one time, in a folder of their own",
            )
        found[rank] = path
    return found


def read(folder: Path) -> tuple[View, ...]:
    """The views of all ranks that have a dump.

    Raises:
        RunError: there are fewer than two, or one cannot be read.

    """
    files = find(folder)
    if len(files) < 2:
        have = f"one dump alone: {next(iter(files.values())).name}" if files else "no file named after a rank"
        raise RunError(f"{folder} holds no dumps of several ranks", evidence=[have], cure=_CURE)
    dumps = {rank: _load(path) for rank, path in files.items()}
    places = Places()
    ops = {rank: _operations(dump, files[rank], places) for rank, dump in dumps.items()}
    members = _members(dumps, ops)
    return tuple(_view(rank, ops[rank], members) for rank in files)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RunError(f"{path} is too big for a dump", evidence=[f"{path.stat().st_size:,} bytes"], cure=_CURE)
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"the dump {path} cannot be read", evidence=[str(error.strerror)]) from error
    try:
        dump = _PlainOnly(io.BytesIO(data)).load()
    except Exception as error:  # pickle raises anything over bytes that are none of its own
        text = "it is JSON, which has no stacks" if data[:1] in {b"{", b"["} else f"{type(error).__name__}: {error}"
        evidence = [f"{len(data):,} bytes", text]
        raise RunError(f"{path} is no dump of the flight recorder", evidence=evidence, cure=_CURE) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        kind = f"a dict without entries: {', '.join(map(str, dump))[:200]}" if isinstance(dump, dict) else ""
        evidence = [kind or f"it holds a {type(dump).__name__}"]
        raise RunError(f"{path} is no dump of the flight recorder", evidence=evidence, cure=_CURE)
    return dump


def _operations(dump: dict[str, Any], path: Path, places: Places) -> tuple[Op, ...]:
    def stack_of(frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
        found = [(*places.of_file(one["filename"]), one) for one in frames]
        # Another machine has its Python elsewhere.
        return tuple(
            Frame(file, int(one["line"]), str(one["name"]), user and not _PYTHONS.search(file))
            for file, user, one in found
        )

    try:
        return ops_of(dump, stack_of)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunError(
            f"the entries of {path} are not those of a flight recorder that instep knows",
            evidence=[f"version {dump.get('version', 'not told')}", f"{type(error).__name__}: {error}"],
            cure="dump again with torch 2.6 or newer",
        ) from error


def _members(dumps: dict[int, dict[str, Any]], ops: dict[int, tuple[Op, ...]]) -> dict[str, tuple[int, ...]]:
    """Of each group: as the dumps say (NCCL), else all ranks that have used it; of the default group all."""
    told: dict[str, tuple[int, ...]] = {}
    for dump in dumps.values():
        config = dump.get("pg_config")
        for name, entry in config.items() if isinstance(config, dict) else ():
            ranks = [int(rank) for rank in re.findall(r"\d+", str(entry.get("ranks", "")))] if name else []
            if ranks:
                told[str(name)] = tuple(ranks)
    used: dict[str, set[int]] = {"0": set(dumps)}
    for rank, entries in ops.items():
        for op in entries:
            used.setdefault(op.group, set()).add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in used.items()} | told


def _view(rank: int, ops: tuple[Op, ...], members: dict[str, tuple[int, ...]]) -> View:
    asked = {name: max((op.index for op in ops if op.group == name), default=0) for name in members}
    groups = tuple(Group(name, ranks, asked[name]) for name, ranks in members.items() if rank in ranks)
    waits = bool(ops) and not ops[-1].done
    stack = ops[-1].frames if waits else ()
    beat = Beat(rank, 0, 0, 0.0, groups, stack, still_s=60.0)
    return View(rank, "", Process(alive=True, state="S"), Snapshot(beat, ops, stack), 0.0, beat, 0.0)
