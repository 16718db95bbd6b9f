"""Who waits for whom: where each rank stands, and whether some can never go on."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.guard.alignment import own, site
from instep.guard.conditions import UNKNOWN, evaluate
from instep.guard.records import Frame, Op
from instep.guard.syntax import called, calls, head

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from instep.guard.alignment import Key, State
    from instep.guard.sources import Sources

_STILL_S = 0.25  # a rank that stands for less has only just come
_BUSY = 0.2  # share of a core
_EXCHANGES = re.compile(r"/torch/(distributed|nn/parallel|autograd|_tensor)|/instep/comm/")
_P2P = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_BATCHES = {"batch_isend_irecv", "P2POp", *_P2P}
_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
    "barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object", "scatter",
    "scatter_object_list", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "_all_gather_base",
}  # fmt: skip


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        rank: of the world.
        what: in words: "all_reduce #5".
        via: what carries it: a group's name, "p2p", "store".
        needs: ranks that have to come.
        every: whether all of them have to, or any one.
        op: the collective, where it is one.
        key: its group.
        certain: whether it is known that the rank waits in this one and no other.

    """

    rank: int
    what: str
    via: str
    needs: frozenset[int]
    every: bool = True
    op: Op | None = None
    key: Key | None = None
    certain: bool = True


def is_busy(state: State) -> bool:
    """Whether a rank works: it runs, or its children do."""
    process = state.view.process
    return process.state == "R" or process.busy > _BUSY


def is_joining(state: State) -> bool:
    """Whether it is where torch makes the world."""
    return any(own(frame.function) == "init_process_group" and "/torch/" in frame.file for frame in _inner(state))


def is_stopped(state: State) -> bool:
    """Whether somebody has stopped its process."""
    return state.view.process.state in {"T", "t"}


def stands_s(state: State) -> float:
    """For how long it has stood where it stands; one that gives no more signs stands too."""
    return state.still_s + (state.view.silent_s if state.view.silent_s > 1.0 else 0.0)


def is_silent(state: State) -> bool:
    """Whether its recorder gives no more signs: something holds the interpreter, which no wait for others does."""
    return state.ended is None and state.view.silent_s > 1.2 and not is_stopped(state)


def _inner(state: State) -> list[Frame]:
    """The frames of libraries in which the user's innermost line is."""
    found: list[Frame] = []
    for frame in state.stack:
        if frame.user:
            break
        found.append(frame)
    return found


def waits(states: Sequence[State], sources: Sources) -> dict[int, Wait]:
    """What each rank waits for, of those that wait for others."""
    by_rank = {one.rank: one for one in states}
    found = {}
    for one in states:
        if (
            one.ended is not None
            or is_silent(one)
            or is_stopped(one)
            or stands_s(one) < _STILL_S
            or (one.view.process.state == "R" and is_busy(one))
        ):
            continue
        wait = _collective(one, by_rank) or _other(one, by_rank, sources)
        if wait is not None:
            found[one.rank] = wait
    return _without_pairs(found, by_rank, sources)


def missing(states: Mapping[int, State], key: Key, index: int) -> frozenset[int]:
    """Members that have not asked for a collective; of one that was killed in it, it is not known."""
    return frozenset(
        rank
        for rank in key[1]
        if rank in states and (states[rank].asked(key) < index or states[rank].ended in {"killed", "failed"})
    )


def _collective(one: State, states: Mapping[int, State]) -> Wait | None:
    inner = _inner(one)
    exchanging = any(_EXCHANGES.search(frame.file) for frame in inner)
    here = site(one.stack)
    open_ops = [(key, op) for key, op in one.order if not op.done]
    if open_ops:
        same = [pair for pair in open_ops if site(pair[1].frames) == here]
        at = one.here()
        waiting = exchanging or (at is not None and bool(inner) is False and _calls_wait(one))
        options = same or (open_ops if waiting else [])
        if options and one.whole:
            lacking = [pair for pair in options if missing(states, pair[0], pair[1].index)]
            key, op = (lacking or options)[0]
            certain = bool(same) or len(lacking or options) == 1
            return Wait(
                one.rank, f"{op.kind} #{op.index}", key[0], _needs(states, key, op, one), True, op, key, certain
            )
    if exchanging and not (one.whole and not open_ops):
        return _guessed(one, inner, states)
    return None


def _needs(states: Mapping[int, State], key: Key, op: Op, one: State) -> frozenset[int]:
    return missing(states, key, op.index) - {one.rank}


def _calls_wait(one: State) -> bool:
    return one.here() is not None


def _guessed(one: State, inner: Sequence[Frame], states: Mapping[int, State]) -> Wait | None:
    """Of a rank whose records are old: from its stack and the counts of its groups."""
    kind = next((own(frame.function) for frame in inner if own(frame.function) in _COLLECTIVES), "")
    backward = any("backward" in frame.function for frame in inner)
    if not kind and not backward:
        return None
    options = []
    for key in one.groups:
        asked = one.asked(key)
        if asked > max(one.ops.get(key, {0: 0})) or not one.ops:
            options.append((key, asked))
    lacking = [pair for pair in options if missing(states, *pair) - {one.rank}]
    for key, asked in (lacking or options)[:1]:
        op = Op(key[0], asked, kind or "all_reduce", (), (), False, one.stack)
        certain = len(options) == 1
        return Wait(one.rank, f"{op.kind} #{asked}", key[0], _needs(states, key, op, one), True, op, key, certain)
    return None


def _other(one: State, states: Mapping[int, State], sources: Sources) -> Wait | None:
    """Messages between two ranks, and the store: no record has them, but the stack."""
    frame = one.here()
    if frame is None:
        return None
    others = frozenset(rank for rank in states if rank != one.rank)
    inner = [own(part.function) for part in _inner(one) if _EXCHANGES.search(part.file)]
    stmt = sources.statement(frame.file, frame.line)
    found = [call for call, _ in calls(head(stmt))] if stmt is not None else []
    for name in inner:
        if name in _P2P:
            peer = _peer(one, frame, [call for call in found if called(call) == name], len(states))
            needs = frozenset({peer}) if peer is not None else others
            return Wait(one.rank, name, "p2p", needs, peer is not None)
        if name == "monitored_barrier":
            return Wait(one.rank, name, "p2p", others, True, certain=False)
    for call in found:
        base = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if called(call) in {"get", "wait"} and "store" in base.lower():
            return Wait(one.rank, f"{base}.{called(call)}()", "store", others, every=False)
        if called(call) == "wait" and not _inner(one):
            return _request(one, frame, sources, others, len(states))
    return None


def _request(one: State, frame: Frame, sources: Sources, others: frozenset[int], size: int) -> Wait | None:
    """A wait for a handle: of a message, where the function makes such."""
    scope = sources.scope(frame.file, own(frame.function), frame.line)
    made = [call for call, _ in calls([scope])] if scope is not None else []
    made = [call for call in made if called(call) in _BATCHES]
    if not made:
        return None
    plain = [call for call in made if called(call) in _P2P]
    peers = {_peer(one, frame, [call], size) for call in plain if called(call) in {"irecv", "recv"}}
    known = len(peers) == 1 and None not in peers and len(plain) == len(made)
    needs = frozenset(peer for peer in peers if peer is not None) if known else others
    return Wait(one.rank, "irecv" if known else "a message", "p2p", needs, known)


def argument(one: State, *words: str) -> int | None:
    """An argument of the call into torch that a rank is inside of, as a rank of the world."""
    for frame in _inner(one):
        for word in words:
            if word in frame.values:
                text = frame.values[word]
                return int(text) if text.lstrip("-").isdigit() else None
    return None


def _peer(one: State, frame: Frame, found: Sequence[ast.Call], size: int) -> int | None:
    values = one.values(frame.file, own(frame.function))
    word = _P2P.get(called(found[0]), "") if found else ""
    if word and (known := argument(one, word)) is not None:
        return known
    for call in found:
        word = _P2P.get(called(call), "")
        given = [part.value for part in call.keywords if part.arg in {word, f"group_{word}"}]
        expression = given[0] if given else call.args[1] if len(call.args) > 1 else None
        peer = evaluate(expression, values, one.rank, size) if expression is not None else UNKNOWN
        if isinstance(peer, int) and not isinstance(peer, bool):
            return peer
    return 1 - one.rank if size == 2 else None


def _without_pairs(found: dict[int, Wait], states: Mapping[int, State], sources: Sources) -> dict[int, Wait]:
    """Leave out two that have met: one sends to the other, which receives from it."""
    del states, sources
    met = set()
    for rank, wait in found.items():
        if wait.via != "p2p" or not wait.what.endswith("send"):
            continue
        for peer in wait.needs:
            other = found.get(peer)
            if other and other.via == "p2p" and not other.what.endswith("send") and rank in other.needs:
                met |= {rank, peer}
    return {rank: wait for rank, wait in found.items() if rank not in met}


def stuck(found: Mapping[int, Wait], ended: Iterable[int]) -> set[int]:
    """The ranks that can never go on: each waits for one of them, or for one that has ended.

    The largest such set: who waits for a rank that still may come leaves it, until nobody does.
    """
    gone = set(ended)
    inside = {rank for rank, wait in found.items() if wait.needs}
    while True:
        lost = inside | gone
        free = {
            rank
            for rank in inside
            if not (found[rank].needs & lost if found[rank].every else found[rank].needs <= lost)
        }
        if not free:
            return inside
        inside -= free


def halted_in(state: State) -> str:
    """In words what halts a rank as a whole, "" where nothing does."""
    if is_stopped(state):
        return "its process is stopped"
    if is_silent(state):
        return "it gives no sign of life and does nothing; a call into a library holds all of its threads"
    return ""


# Where a rank stands that waits for no other

_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(debugpy|pydevd|ipdb|pudb)/")
_FROM_OUTSIDE = {"message", "connection", "process", "line", "file", "server", "result"}  # may come little by little
_WOKEN_S = 2.0
_TRICKLE = 0.02  # share of a core: more than a recorder's, less than work
_BLOCKING = {
    "input": "for somebody to type", "get": "in a queue", "put": "in a full queue", "acquire": "for a lock",
    "flock": "for a lock", "lockf": "for a lock", "join": "for a thread or process", "wait": "for an event",
    "recv": "for a message", "accept": "for a connection", "connect": "for a connection", "select": "for a message",
    "poll": "for a message", "result": "for a result", "communicate": "for a process", "readline": "for a line",
    "read": "for a file", "open": "for a file", "urlopen": "for a server", "run": "for a process",
    "check_call": "for a process", "check_output": "for a process", "waitpid": "for a process", "pause": "for a signal",
}  # fmt: skip


def blocked_in(state: State, sources: Sources) -> str | None:
    """In words what a sleeping rank is blocked by; None where it may only sleep for a while."""
    frame = state.here()
    if frame is None or any(_DEBUGGER.search(part.file) for part in state.stack):
        return None
    inner = [own(part.function) for part in _inner(state)]
    stmt = sources.statement(frame.file, frame.line)
    names = [called(call) for call, _ in calls(head(stmt))] if stmt is not None else []
    if isinstance(stmt, (ast.With, ast.AsyncWith)) and any(
        "lock" in ast.unparse(one.context_expr).lower() for one in stmt.items
    ):
        return "it waits for a lock"
    if any("sleep" in name for name in names) or (not inner and state.view.process.waits_in == "hrtimer_nanosleep"):
        return "it looks again and again for something that does not come" if _polls(frame, sources) else None
    if any("/torch/utils/data/" in part.file for part in _inner(state)):
        return "it waits for its data loader's workers, which do nothing"
    for name in (*inner, *names):
        if name in _BLOCKING:
            word = _BLOCKING[name]
            return None if word.split()[-1] in _FROM_OUTSIDE and _gets_something(state) else f"it waits {word}"
    return "it stands still" if inner or names else None


def _gets_something(state: State) -> bool:
    """Whether a rank that waits for something from outside gets it, slowly."""
    process = state.view.process
    return process.busy > _TRICKLE or (process.woke_s is not None and process.woke_s < _WOKEN_S)


def _polls(frame: Frame, sources: Sources) -> bool:
    """Whether a sleep is part of a loop that looks for something, not only of one that passes time."""
    tree = sources.tree(frame.file)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.While) or not node.lineno <= frame.line <= (node.end_lineno or node.lineno):
            continue
        timed = any(name in {"time", "monotonic", "perf_counter", "now"} for name in _names(node.test))
        leaves = any(isinstance(part, (ast.Break, ast.Return)) for part in ast.walk(node))
        constant = isinstance(node.test, ast.Constant)
        if (not timed and not constant) or leaves:
            return True
    return False


def _names(node: ast.AST) -> list[str]:
    return [called(call) for call, _ in calls([node])]
