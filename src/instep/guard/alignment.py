"""The records of all ranks side by side: the same index of the same group is the same collective."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.guard.flow import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from instep.guard.records import End, Frame, Group, Op, Raised, View

Key = tuple[str, tuple[int, ...]]  # a group: its name and its members; the name alone may mean another elsewhere
Site = tuple[tuple[str, str, int], ...]  # the user's frames, outermost first: file, function, line

_P2P = re.compile(r"^(i?send|i?recv)")
_ROOTED = re.compile(r"^_?(broadcast|reduce$|gather|scatter)")
_CONSEQUENCE = re.compile(
    r"connection (reset|closed|refused|aborted)|broken pipe|socket (closed|was closed)|closed by peer|peer closed"
    r"|remote process exited|unexpected eof|failed to recv, got 0 bytes|store.*(gone|closed)|address family mismatch"
    r"|RankGone|connectionreset|Read error|Write error|Application timeout caused pair closure|SendRecv.*failed",
    re.IGNORECASE,
)


def own(name: str) -> str:
    """A function's own name, of a qualified one."""
    return name.rsplit(".", 1)[-1]


def site(frames: Iterable[Frame]) -> Site:
    """The user's way to a place, outermost first."""
    return tuple([(one.file, own(one.function), one.line) for one in frames if one.user][::-1])


_ONCE = re.compile(r"/torch/|/contextlib\.py$|/functools\.py$|/instep/comm/|/instep/data/")
_MANY = re.compile(r"/torch/(optim|utils/data)/")  # parts of torch that call back as often as they see fit
_INLINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def steps(frames: Sequence[Frame]) -> tuple[Step, ...]:
    """The user's frames outermost first, with what a library does in between."""
    found: list[Step] = []
    between: list[Frame] = []
    for frame in reversed(tuple(frames)):
        if not frame.user:
            between.append(frame)
            continue
        if found and own(frame.function) in _INLINE and found[-1].file == frame.file:
            last = found[-1]  # part of the statement around it
            found[-1] = Step(last.file, last.function, last.line, last.calls, last.engine)
            between = []
            continue
        if found:
            found[-1] = _with_calls(found[-1], between)
        engine = bool(found) and any(_MANY.search(one.file) or not _ONCE.search(one.file) for one in between)
        found.append(Step(frame.file, own(frame.function), frame.line, (), engine))
        between = []
    if found:
        found[-1] = _with_calls(found[-1], between)
    return tuple(found)


def _with_calls(step: Step, between: Sequence[Frame]) -> Step:
    names = (*step.calls, *(own(one.function) for one in between))
    return Step(step.file, step.function, step.line, names, step.engine)


@dataclass
class State:
    """What is known of one rank, the newest of everything.

    Attributes:
        rank: of the world.
        view: as it came.
        groups: by key.
        ops: by group and index, collectives only.
        order: all of them as they were asked for.
        stack: innermost first, with values where they are known.
        still_s: for how long it has stood so.
        seen_s: how old that knowledge is.
        ended: how it ended, None while it runs.
        error: the exception that ended it.
        secondary: whether that is only the consequence of another rank's end.
        whole: whether the operations are as new as the stack.
        counted: the groups' counts when the operations were recorded.

    """

    rank: int
    view: View
    groups: dict[Key, Group] = field(default_factory=dict)
    ops: dict[Key, dict[int, Op]] = field(default_factory=dict)
    order: list[tuple[Key, Op]] = field(default_factory=list)
    stack: tuple[Frame, ...] = ()
    still_s: float = 0.0
    seen_s: float = 0.0
    ended: End | None = None
    error: Raised | None = None
    secondary: bool = False
    whole: bool = False
    counted: dict[Key, int] = field(default_factory=dict)

    @property
    def handled(self) -> tuple[Raised, ...]:
        """Exceptions being handled."""
        return self.view.snapshot.handled if self.view.snapshot else ()

    @property
    def facts(self) -> Mapping[str, str]:
        """Fingerprints."""
        return self.view.snapshot.facts if self.view.snapshot else {}

    def asked(self, key: Key) -> int:
        """How many collectives of a group it has asked for.

        By its records, and what its group's count has grown by since: gloo counts messages between two ranks too.
        """
        count = self.groups[key].asked if key in self.groups else 0
        if not self.ops.get(key):
            return count
        return max(self.ops[key]) + max(0, count - self.counted.get(key, count))

    def here(self) -> Frame | None:
        """The user's frame that it stands at."""
        return next((one for one in self.stack if one.user), None)

    def values(self, file: str, function: str) -> dict[str, str]:
        """Values in a function's frame on its stack, or where its exception was; none where it has called itself."""
        found = [one for one in self.stack if one.user and (one.file, own(one.function)) == (file, function)]
        if found:
            return found[0].values if len(found) == 1 else {}
        for raised in (self.error, *self.handled):
            for frame in raised.frames if raised else ():
                if (frame.file, own(frame.function)) == (file, function) and frame.values:
                    return frame.values
        return {}


def state(view: View) -> State:
    """The newest of what is known of a rank."""
    found = State(view.rank, view)
    snapshot, beat = view.snapshot, view.beat
    newest = beat
    if snapshot is not None and (beat is None or snapshot.beat.count >= beat.count):
        newest = snapshot.beat
    if newest is not None:
        found.groups = {(one.name, one.members): one for one in newest.groups}
        found.stack, found.still_s = newest.stack, newest.still_s
        found.seen_s = view.silent_s if newest is beat else view.age_s
    if snapshot is not None:
        _take_ops(found, snapshot.ops)
        found.counted = {(one.name, one.members): one.asked for one in snapshot.beat.groups}
        if newest is snapshot.beat or _places(snapshot.stack) == _places(found.stack):
            found.stack = snapshot.stack or found.stack
            found.whole = all(found.counted.get(key, 0) >= group.asked for key, group in found.groups.items())
        found.error = snapshot.last_raised
    if view.process.state in {"T", "t"} and newest is beat:
        found.still_s += view.silent_s
    _take_end(found, newest.ended if newest else None)
    return found


def _places(stack: Iterable[Frame]) -> list[tuple[str, int, str]]:
    return [(one.file, one.line, own(one.function)) for one in stack]


def _take_ops(found: State, ops: Iterable[Op]) -> None:
    keys = {name: (name, members) for name, members in found.groups}
    last: dict[Key, int] = {}
    for op in ops:
        key = keys.get(op.group)
        if key is None or _P2P.match(op.kind):
            continue
        if op.index < last.get(key, 0):  # a new group of an old name: the old one's records are no use
            found.ops[key] = {}
            found.order = [one for one in found.order if one[0] != key]
        last[key] = op.index
        found.ops.setdefault(key, {})[op.index] = op
        found.order.append((key, op))


def _take_end(found: State, said: End | None) -> None:
    process = found.view.process
    code = process.exit_code
    if said is not None:
        found.ended = said
    elif not process.alive or code is not None:
        found.ended = "finished" if code == 0 else "killed" if code is None or code >= 128 or code < 0 else "failed"
    if found.ended == "finished" and code is not None and code != 0:
        found.ended = "killed" if code >= 128 or code < 0 else "failed"
    text = f"{found.error.kind}: {found.error.text}" if found.error else process.last_words
    found.secondary = found.ended == "failed" and bool(_CONSEQUENCE.search(text))


# What must be equal


def _count(shape: Sequence[int]) -> int:
    product = 1
    for one in shape:
        product *= one
    return product


_BYTES = {"Float": 4, "Int": 4, "Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2}


def byte_count(op: Op) -> int:
    """How much an operation moves."""
    size = max((_BYTES.get(one, 1) for one in op.dtypes), default=1)
    return size * sum(_count(one) for one in op.sizes)


def difference(one: Op, other: Op) -> str:  # noqa: PLR0911
    """In what the same collective differs between two ranks so that it cannot be the same: "" for in nothing."""
    if (one.kind, one.sizes, one.dtypes, one.root) == (other.kind, other.sizes, other.dtypes, other.root):
        return ""
    if one.kind != other.kind:
        return "operation"
    if one.root is not None and other.root is not None and one.root != other.root:
        return "root"
    kind = one.kind.lstrip("_")
    if kind.startswith(("barrier", "coalesced")):
        return ""
    if one.dtypes and other.dtypes and set(one.dtypes) != set(other.dtypes):
        return "dtype"
    if not one.sizes or not other.sizes or kind.startswith(("all_to_all", "alltoall")):
        return ""
    if any("_object" in own(frame.function) for op in (one, other) for frame in op.frames if not frame.user):
        return ""  # lengths of pickles; the library pads them itself
    if kind.startswith(("scatter", "gather")):  # lists at the root only
        mine, theirs = {_count(size) for size in one.sizes}, {_count(size) for size in other.sizes}
        return "size" if len(mine) == len(theirs) == 1 and mine != theirs else ""
    mine_all, theirs_all = [_count(size) for size in one.sizes], [_count(size) for size in other.sizes]
    return "size" if sum(mine_all) != sum(theirs_all) else ""


def is_rooted(op: Op) -> bool:
    """Whether ranks have unlike parts in it, and so may well call it from unlike lines."""
    return bool(_ROOTED.match(op.kind))


def classes(ops: Mapping[int, Op]) -> list[list[int]]:
    """Ranks whose operation is the same, the largest class first."""
    found: list[list[int]] = []
    for rank, op in ops.items():
        fit = next((one for one in found if not difference(ops[one[0]], op)), None)
        if fit is None:
            found.append([rank])
        else:
            fit.append(rank)
    return sorted(found, key=lambda one: (-len(one), one))


def groups(states: Iterable[State]) -> list[Key]:
    """All groups of which records are there, the default one first."""
    keys = {key for one in states for key in (*one.groups, *one.ops)}
    return sorted(keys, key=lambda key: (-len(key[1]), len(key[0]), key))


@dataclass(frozen=True)
class Unlike:
    """The first index of a group where the operations differ."""

    key: Key
    index: int
    ops: dict[int, Op]
    what: str


def first_unlike(states: Sequence[State], key: Key) -> Unlike | None:
    """The first collective of a group that is not the same on all ranks that have asked for it."""
    members = [one for one in states if one.rank in key[1] and one.ops.get(key)]
    for index in sorted({index for one in members for index in one.ops[key]}):
        ops = {one.rank: one.ops[key][index] for one in members if index in one.ops[key]}
        ranks = classes(ops) if len(ops) > 1 else []
        if len(ranks) > 1:
            return Unlike(key, index, ops, difference(ops[ranks[0][0]], ops[ranks[1][0]]))
    return None


@dataclass(frozen=True)
class Apart:
    """The first index of a group that ranks asked for from unlike places, though it is the same operation."""

    key: Key
    index: int
    ops: dict[int, Op]
    sites: list[list[int]]  # ranks by place, the largest first


def first_apart(states: Sequence[State], key: Key, before: int | None = None) -> Apart | None:
    """Where the call sites part in a way that cannot be meant.

    Ranks may well ask for one collective from two lines, the one in a branch for the main rank, say. It is no such
    branch when a line that one rank is at is used by the others too, for another index: then one has lost or won a
    collective, or has another order.
    """
    members = [one for one in states if one.rank in key[1] and one.ops.get(key)]
    sites = {one.rank: {index: site(op.frames) for index, op in one.ops[key].items()} for one in members}
    used: dict[int, Counter[Site]] = {}
    for index in sorted({index for one in members for index in one.ops[key]}):
        if before is not None and index >= before:
            return None
        by_site: dict[Site, list[int]] = {}
        for rank, places in sites.items():
            if places.get(index):
                by_site.setdefault(places[index], []).append(rank)
        if len(by_site) < 2:
            continue
        ops = {one.rank: one.ops[key][index] for one in members if index in one.ops[key]}
        if all(is_rooted(op) for op in ops.values()) or any(_is_joined(op) for op in ops.values()):
            continue
        used = used or {rank: Counter(places.values()) for rank, places in sites.items()}
        if _shifted(by_site, used):
            return Apart(key, index, ops, sorted(by_site.values(), key=lambda one: (-len(one), one)))
    return None


def _is_joined(op: Op) -> bool:
    """Whether it stands in for those of a rank that has no more data, as torch's Join does."""
    return any("/torch/distributed/algorithms/join" in frame.file for frame in op.frames)


def _shifted(by_site: Mapping[Site, list[int]], used: Mapping[int, Counter[Site]]) -> bool:
    return any(used[other][place] for place, ranks in by_site.items() for other in used if other not in ranks)
