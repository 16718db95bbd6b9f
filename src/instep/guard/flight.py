"""Process groups and torch's flight recorder, as they are in this process: read, never changed."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from instep.guard.records import Frame, Group, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from instep.guard.storage import RawGroup

MOST_OPS = 500  # of each group
_KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "ALLREDUCE_coalesced": "all_reduce_coalesced",
    "ALLGATHER_coalesced": "all_gather_coalesced",
}
_ROOTED = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}


def groups() -> tuple[RawGroup, ...]:
    """All groups that this process is in: name, members as ranks of the world, collectives asked for so far."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return ()
    found = []
    # Groups may come and go meanwhile: what cannot be read is left out this time.
    for group, name in _items(world, "pg_names"):
        try:
            members = tuple(world.pg_group_ranks[group])
            found.append((str(name), members, int(group._get_sequence_number_for_group())))  # noqa: SLF001
        except Exception:  # noqa: BLE001, S112
            continue
    return tuple(found)


def _items(world: object, name: str) -> Sequence[tuple[Any, Any]]:
    try:
        return list(getattr(world, name).items())
    except Exception:  # noqa: BLE001  # torch is being imported, or changes it just now
        return ()


class _Later(types.ModuleType):
    """Stands in for torch._inductor for some milliseconds: imports it for whoever wants more of it than torch does."""

    def __getattr__(self, name: str) -> Any:
        if name == "codecache" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes it a second.

    To name the frames of compiled code it asks ``hasattr(torch, "_inductor")``, which imports it. Where nobody has
    imported it, there is no compiled code.
    """
    torch = sys.modules.get("torch")
    stands_in = None
    if torch is not None and "torch._inductor" not in sys.modules and "_inductor" not in vars(torch):
        stands_in = vars(torch)["_inductor"] = _Later("torch._inductor")
    try:
        yield
    finally:
        if torch is not None and stands_in is not None and vars(torch).get("_inductor") is stands_in:
            del vars(torch)["_inductor"]


def dump() -> bytes:
    """What torch's flight recorder holds, as it comes; b"" where there is none.

    It is unpacked where it is read: tens of thousands of small objects in this process would not only take time, but
    call for the garbage collector, which goes through all that a program has for that.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    look = getattr(module, "_dump_fr_trace", None) or getattr(module, "_dump_nccl_trace", None)
    if look is None:
        return b""
    with _without_inductor():
        found: bytes = look(True, True, False)
    return found


class _Plain(pickle.Unpickler):
    """Takes plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump of the flight recorder")


def ops_in(
    dumped: bytes, place: Callable[[str], tuple[str, bool]], stack: Sequence[Frame], groups: Iterable[Group]
) -> tuple[Op, ...]:
    """The last operations of all groups, in the order in which they were asked for.

    Args:
        dumped: by :func:`dump`.
        place: gives a file's path and whether it is the user's.
        stack: of the main thread, with values: tells the root of the operation that it waits in.
        groups: with their members.

    Raises:
        ValueError: it is no dump.

    """
    try:
        told = _Plain(io.BytesIO(dumped)).load() if dumped else {}
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
        raise ValueError(str(error)) from error
    return with_root(ops_of(told, Stacks(place).of), stack, {one.name: one.members for one in groups})


class Stacks:
    """Makes frames of those in a dump; equal stacks are one object."""

    def __init__(self, place: Callable[[str], tuple[str, bool]]) -> None:
        self._place = place
        self._frames: dict[tuple[str, int, str], Frame] = {}
        self._stacks: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    def of(self, frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
        """A stack, innermost first."""
        found = [self._frame(one["filename"], one["line"], one["name"]) for one in frames]
        # By identity: equal frames are the same object here.
        return self._stacks.setdefault(tuple(map(id, found)), tuple(found))

    def _frame(self, file: str, line: int, function: str) -> Frame:
        key = file, line, function
        known = self._frames.get(key)
        if known is None:
            path, user = self._place(file)
            known = self._frames[key] = Frame(path, line, function, user)
        return known


def left(groups: Iterable[Group], ops: Iterable[Op]) -> tuple[Group, ...]:
    """The groups that a rank has been in, also where it has destroyed them, with what was asked for to the end."""
    last: dict[str, int] = {}
    for op in ops:
        last[op.group] = max(op.index, last.get(op.group, 0))
    return tuple(replace(one, asked=max(one.asked, last.get(one.name, 0))) for one in groups)


def ops_of(told: Mapping[str, Any], stack_of: Callable[[Any], tuple[Frame, ...]]) -> tuple[Op, ...]:
    """The operations in a dump of the flight recorder: the last ones of each group.

    Args:
        told: the dump, unpickled.
        stack_of: makes frames of the dump's.

    """
    taken: dict[str, int] = {}
    found = []
    for entry in reversed(told.get("entries", ())):
        if entry.get("is_p2p"):
            continue
        group = str(entry["process_group"][0])
        number = taken[group] = taken.get(group, 0) + 1
        if number <= MOST_OPS:
            found.append(_op(entry, group, stack_of))
    return tuple(reversed(found))


def _op(entry: Mapping[str, Any], group: str, stack_of: Callable[[Any], tuple[Frame, ...]]) -> Op:
    sizes = entry["input_sizes"] or entry["output_sizes"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"]
    return Op(
        group,
        int(entry["collective_seq_id"]),
        kind_of(str(entry["profiling_name"])),
        tuple(tuple(one) for one in sizes),
        tuple(map(str, dtypes)),
        bool(entry.get("retired")) or entry.get("state") == "completed",
        stack_of(entry.get("frames") or ()),
        int(entry.get("time_created_ns") or 0),
    )


def kind_of(name: str) -> str:
    """An operation's name without its backend's: "gloo:all_reduce" and "nccl:all_reduce" are the same."""
    kind = name.partition(":")[2] or name
    return _KINDS.get(kind, kind)


def with_root(ops: tuple[Op, ...], stack: Sequence[Frame], members: Mapping[str, tuple[int, ...]]) -> tuple[Op, ...]:
    """The operations, the one that the main thread waits in with its root, a rank of the world."""
    for frame in stack:
        name = _ROOTED.get(frame.function)
        root = _root(name, frame.values, members) if name else None
        if root is None:
            continue
        for at in range(len(ops) - 1, -1, -1):
            op = ops[at]
            if op.group == frame.values["group"] and op.kind == frame.function and not op.done:
                return (*ops[:at], replace(op, root=root), *ops[at + 1 :])
    return ops


def _root(name: str, values: Mapping[str, str], members: Mapping[str, tuple[int, ...]]) -> int | None:
    """From the arguments of torch's function, which has either a rank of the world or one of the group."""
    if (text := values.get(name, "")).isdigit():
        return int(text)
    of_group = members.get(values.get("group", ""), ())
    text = values.get(f"group_{name}", "")
    return of_group[int(text)] if text.isdigit() and int(text) < len(of_group) else None
