"""The line where a rank left the common path: the branch, loop, handler or return between two places in the program."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.guard.alignment import own, steps
from instep.guard.conditions import (
    UNKNOWN,
    asks_for_rank,
    is_rank_local,
    names,
    singled_out,
    truth,
    value_of,
)
from instep.guard.syntax import ENDS as _ENDS, Flow, Node, Sources, Step, called, calls, condition, head
from instep.guard.verdicts import LeftAt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeGuard

    from instep.guard.alignment import State
    from instep.guard.records import Frame

_Sides = tuple[tuple[int, ...], tuple[int, ...]]  # the ranks that are healthy, and the others
_JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_JUMP_WORDS: dict[type[ast.stmt], str] = {
    ast.Continue: "continue",
    ast.Break: "break",
    ast.Return: "return",
    ast.Raise: "raise",
}
_WHY = {"match": "another case was taken here", "assert": "this assertion failed"}
_SAME_EVERYWHERE = {
    "step",
    "epoch",
    "i",
    "it",
    "iteration",
    "args",
    "config",
    "cfg",
    "range",
    "len",
    "global_step",
    "n",
}
_COMMON = {"wrapper", "inner", "_call_impl", "_wrapped_call_impl", "__call__", "<module>", "<lambda>", "run", "main"}
_PASSED = "it came by here without the collective that the others made"
_APART = "the ranks are apart here; no branch between them was found"
_CLEAR = 1.0  # points between the best candidate and the next, else both are named


@dataclass(frozen=True)
class Parting:
    """Where two ranks parted.

    Attributes:
        left_at: the line.
        values: what its condition was, by rank.
        evidence: further lines for people.
        leavers: the ranks that it shows to be the unusual ones; empty where it shows nothing.
        sure: whether no other line is as likely.
        score: how much speaks for it.

    """

    left_at: LeftAt
    values: dict[int, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    leavers: tuple[int, ...] = ()
    sure: bool = True
    score: float = 0.0


@dataclass
class _Candidate:
    node: Node
    healthy: set[str]  # labels of the ways to where the healthy ranks are
    culprit: set[str]
    forced: bool
    score: float = 0.0
    test: ast.expr | None = None
    results: dict[int, bool | None] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    raised_at: int | None = None
    counted: bool = False  # the trips of a loop are known on both sides


class Locator:
    """Finds lines; one for each verdict, so that each file is read once.

    Args:
        read: the text of a file, None where it cannot be had.
        states: of all ranks, for the values of their variables.

    """

    def __init__(self, read: Callable[[str], str | None], states: Mapping[int, State]) -> None:
        self.sources = Sources(read)
        self.states = states
        self.size = len(states)

    def part(
        self,
        before: Sequence[Frame] | None,
        healthy: Sequence[Frame],
        culprit: Sequence[Frame],
        healthy_ranks: Iterable[int],
        culprit_ranks: Iterable[int],
        *,
        shifted: bool = False,
    ) -> Parting | None:
        """Where the ways to two places parted.

        Args:
            before: the stack of the last collective that both had in common, innermost first; None: the beginning.
            healthy: where the healthy ranks are; empty: they have ended.
            culprit: where the culprit is; the same.
            healthy_ranks: who is there.
            culprit_ranks: the same.
            shifted: whether both are known to be in unlike trips of one loop.

        """
        sides = (tuple(healthy_ranks), tuple(culprit_ranks))
        try:
            return self._part([steps(before or ()), steps(healthy), steps(culprit)], sides, shifted=shifted)
        except Exception:  # noqa: BLE001  # of a program in a form never seen: a verdict without its line beats none
            return None

    def _part(self, ways: list[tuple[Step, ...]], sides: _Sides, *, shifted: bool) -> Parting | None:
        if not ways[1] and not ways[2]:
            return None
        flow = Flow(self.sources, ways)
        search = _Search(flow, sides)
        starts = [one for node in flow.ends[0] for one in _after(node)] if ways[0] and flow.ends[0] else [flow.entry]
        searches = [search.between, search.first]
        if flow.ends[1] & flow.ends[2]:
            searches = [search.around] if shifted else []
        for look, begin in [*((one, starts) for one in searches), (search.between, [flow.entry])]:
            found = look(begin)
            for one in found:
                self._weigh(one, sides, found)
                one.score -= _never_begun(one, ways[0])
            found.sort(key=lambda one: -one.score)
            if found and found[0].score > 0:
                return self._told(found, sides)
        return (
            self._thrown(sides)
            or self._exit_elsewhere(ways, sides)
            or self._fork(ways[1], ways[2], sides, passed=_passed(flow, starts))
        )

    def _thrown(self, sides: _Sides) -> Parting | None:
        """The culprit is on its way out with an exception, through a `finally` say."""
        for rank in sides[1]:
            state = self.states.get(rank)
            for raised in state.handled if state else ():
                frame = next((one for one in raised.frames if one.user), None)
                if frame is not None:
                    source = self.sources.line(frame.file, frame.line)
                    place = LeftAt(
                        frame.file, frame.line, own(frame.function), source, f"{raised.kind} was raised here"
                    )
                    return Parting(place, {rank: f"{raised.kind}: {raised.text}"}, (), (rank,), score=2.0)
        return None

    def _exit_elsewhere(self, ways: Sequence[Sequence[Step]], sides: _Sides) -> Parting | None:
        """A rank that has ended without a word: the one condition in the program's files that ends a process."""
        if ways[1] and ways[2]:
            return None
        found: list[tuple[str, ast.If]] = []
        for file in {step.file for way in ways for step in way}:
            tree = self.sources.tree(file)
            found += [(file, node) for node in ast.walk(tree) if _ends_process(node)] if tree else []
        if len(found) != 1:
            return None
        file, node = found[0]
        scope = next((step.function for way in ways for step in way if step.file == file), "")
        function = self.sources.function_at(file, node.lineno) or scope
        place = LeftAt(file, node.lineno, function, self.sources.line(file, node.lineno), "it ends the process here")
        left = sides[1] if not ways[2] else sides[0]
        return Parting(place, {}, (), left, score=1.0)

    def may_come(self, place: Sequence[Frame], goal: Sequence[Frame]) -> bool:
        """Whether a rank that stands at a place may still come to a collective; True where that cannot be told.

        It may come to the very line, or to another that makes the same call by its name: a branch for the main rank
        may well have a barrier of its own.

        Args:
            place: the rank's stack, innermost first.
            goal: the stack of those that wait in the collective.

        """
        ways = [steps(place), steps(goal)]
        if not ways[0] or not ways[1]:
            return not ways[1]
        if any(self.sources.scope(one.file, one.function, one.line) is None for way in ways for one in way):
            return True
        try:
            flow = Flow(self.sources, ways)
        except Exception:  # noqa: BLE001  # as above: then nothing is known of its ways
            return True
        if not flow.ends[0] or not flow.ends[1]:
            return True
        ahead = _forward(_after_all(flow.ends[0]), set())
        if ahead & flow.ends[1]:
            return True
        wanted = {own(one.function) for one in goal} - _COMMON
        files = {one.file for way in ways for one in way}
        return any(self._mentions(head(node.stmt), wanted, files, set()) for node in ahead if node.stmt is not None)

    def _mentions(self, parts: Iterable[ast.AST], wanted: set[str], files: set[str], seen: set[str]) -> bool:
        """Whether some expressions call one of these functions, or one of the user's that does."""
        for call, _ in calls(parts):
            name = called(call)
            if name in wanted:
                return True
            if not name or name in seen:
                continue
            seen.add(name)
            bodies = [body for file in files for body in self.sources.bodies(file, name)]
            if any(self._mentions(body, wanted, files, seen) for body in bodies):
                return True
        return False

    # Points

    def _weigh(self, one: _Candidate, sides: _Sides, every: Sequence[_Candidate]) -> None:
        one.score = 1.8 if one.forced else 1.0  # of two guards in a row only the last one is
        kind = one.node.kind
        if kind == "for":
            self._weigh_trips(one, sides, every)
        elif kind in {"except", "with"}:
            self._weigh_handler(one, sides)
        else:
            self._weigh_condition(one, sides)

    def _values(self, node: Node, rank: int) -> dict[str, str]:
        return self.states[rank].values(node.file, node.function) if rank in self.states else {}

    def _weigh_condition(self, one: _Candidate, sides: _Sides) -> None:
        labels = self._take_test(one)
        if one.test is None:
            one.score -= 0.0 if isinstance(one.node.stmt, ast.Match) else 1.5
            return
        if self._counts_only(one.node, one.test):  # the same on all ranks in one trip; they may be in unlike trips now
            one.score -= 1.5
            return
        for rank in (*sides[0], *sides[1]):
            one.results[rank] = truth(one.test, self._values(one.node, rank), rank, self.size)
        agreed, contrary = _agreement(one.results, sides, labels)
        # The culprit has come by again since: that the condition is now as the others have it is no wonder.
        later = contrary and not one.forced and not _agreement(one.results, (sides[0], ()), labels)[1]
        if isinstance(one.node.stmt, ast.If) and any(_jumps(one, jump) for jump in _JUMPS):
            one.score += 0.5
        differ = len({result for result in one.results.values() if result is not None}) > 1
        one.score += (6.0 if agreed == 2 and differ else 1.5 * agreed) - (1.0 if later else 3.0) * contrary
        if differ and not contrary and agreed < 2:
            one.score += 2.0
        one.score += _rank_points(one.test, contrary)
        self._say_values(one, sides, labels)

    def _take_test(self, one: _Candidate) -> tuple[set[str], set[str]]:
        """Find a candidate's condition, and the labels of its ways in terms of that."""
        stmt = one.node.stmt
        if isinstance(stmt, (ast.If, ast.While, ast.Assert)):
            one.test = stmt.test
        elif isinstance(stmt, ast.stmt) and one.node.kind == "expression":
            wanted = [called(call) for call, _ in calls(head(stmt))]
            one.test, label = condition(head(stmt), wanted)
            names_of = {"call": label, "skip": _other(label)}
            healthy, culprit = ({names_of.get(way, "") for way in side} for side in (one.healthy, one.culprit))
            return healthy, culprit
        return one.healthy, one.culprit

    def _counts_only(self, node: Node, test: ast.expr) -> bool:
        """Whether a condition goes only by counters of loops around it, as ``step % 100 == 0``."""
        counters = {
            part.id
            for loop in ast.walk(self.sources.tree(node.file) or ast.Module([], []))
            if isinstance(loop, ast.For) and loop.lineno <= node.line <= (loop.end_lineno or loop.lineno)
            for part in _counters(loop)
        }
        used = set(names(test))
        return bool(used) and used <= counters | _SAME_EVERYWHERE and bool(used & (counters | {"step", "epoch"}))

    def _say_values(self, one: _Candidate, sides: _Sides, labels: tuple[set[str], set[str]]) -> None:
        """The condition by rank: as its variables have it, or, where they have changed since, as the way taken does."""
        assert one.test is not None
        for ranks, ways, is_culprit in ((sides[0], labels[0], False), (sides[1], labels[1], True)):
            taken = {_truth_of(way) for way in ways} - {None}
            for rank in ranks:
                result = one.results[rank]
                if len(taken) == 1 and result not in taken:
                    result = next(iter(taken)) if one.forced or is_culprit else None
                    one.results[rank] = result
                if result is not None:
                    one.values[rank] = f"{ast.unparse(one.test)}: {result}"

    def _trips(self, loop: ast.AST, node: Node, rank: int) -> tuple[str, float] | None:
        """A number that counts a loop's trips on a rank: its variable, or the first of them."""
        assert isinstance(loop, (ast.For, ast.AsyncFor))
        values = self._values(node, rank)
        for target in ast.walk(loop.target):
            if isinstance(target, ast.Name) and target.id in values:
                found = value_of(values[target.id])
                if (
                    isinstance(found, (int, float))
                    and not isinstance(found, bool)
                    and not _is_tensor(values[target.id])
                ):
                    return target.id, float(found)
        return None

    def _weigh_trips(self, one: _Candidate, sides: _Sides, every: Sequence[_Candidate]) -> None:
        loop = one.node.stmt
        assert isinstance(loop, (ast.For, ast.AsyncFor))
        over = [called(call) for call, _ in calls([loop.iter])] + names(loop.iter)
        if any(part in name.lower() for name in over for part in ("loader", "data", "batch", "stream", "iter", "zip")):
            one.score += 1.0
        known = {rank: self._trips(loop, one.node, rank) for rank in (*sides[0], *sides[1])}
        counts = [[known[rank][1] for rank in side if known[rank]] for side in sides]  # type: ignore[index]
        for rank, trip in known.items():
            if trip is not None:
                one.values[rank] = f"{trip[0]} = {trip[1]:g}"
        if "end" in one.culprit and "end" not in one.healthy:
            going, left = counts
        elif "end" in one.healthy and "end" not in one.culprit:
            left, going = counts
        else:
            return
        one.counted = bool(going and left)
        if going and left:
            one.score += 6.0 if max(left) < min(going) else -6.0
        elif not any(True for _ in every if _.node.kind in {"if", "except"}):
            one.score += 0.5
        if not (going and left) and "range" in over:
            one.score -= 4.0 if not any(isinstance(part, ast.Name) for part in _range_arguments(loop)) else 0.5
        breaks = [other for other in every if other.node.kind == "if" and _jumps(other, ast.Break)]
        if going and left and max(left) < min(going) and breaks and self._ends_alike(loop, one.node, sides):
            one.score -= 7.0

    def _ends_alike(self, loop: ast.For | ast.AsyncFor, node: Node, sides: _Sides) -> bool:
        """Whether a loop's own end is the same on all ranks, range(8) say, so that it cannot have ended by itself."""
        for call, _ in calls([loop.iter]):
            if called(call) == "range" and not any(True for _ in calls(call.args)):
                texts = {tuple(sorted(self._fixed(call, node, rank).items())) for side in sides for rank in side}
                return len(texts) == 1
        return False

    def _fixed(self, call: ast.Call, node: Node, rank: int) -> dict[str, str]:
        values = self._values(node, rank)
        return {name: values.get(name, "") for arg in call.args for name in names(arg)}

    def _weigh_handler(self, one: _Candidate, sides: _Sides) -> None:
        handler = one.node.stmt
        one.score = 2.0 if one.forced else 1.5
        if isinstance(handler, ast.ExceptHandler):
            if any(isinstance(stmt, _JUMPS) for stmt in handler.body):
                one.score += 0.5
            first, last = handler.lineno, handler.end_lineno or handler.lineno
            for rank in sides[1]:
                state = self.states.get(rank)
                frames = state.stack if state else ()
                here = [frame for frame in frames if frame.file == one.node.file and first <= frame.line <= last]
                if here or (
                    state and any(raised.frames and _inside(raised.frames, one.node) for raised in state.handled)
                ):
                    one.score += 5.0
            if "in handler" in one.culprit or "in handler" in one.healthy:
                one.score += 5.0
        for rank in (*sides[0], *sides[1]):
            raised = self.states[rank].handled if rank in self.states else ()
            if raised:
                one.values[rank] = f"{raised[-1].kind}: {raised[-1].text}"

    # Words

    def _told(self, found: Sequence[_Candidate], sides: _Sides) -> Parting:
        best = found[0]
        place = self._place(best)
        rivals = [
            one
            for one in found[1:]
            if best.score - one.score < _CLEAR and (one.node.file, one.node.line) != (place.file, place.line)
        ]
        evidence = list(best.notes)
        if rivals:
            others = ", ".join(f"{one.node.file}:{one.node.line}" for one in rivals[:3])
            evidence.append(f"as likely by the program's text: {others}")
            place = LeftAt(
                place.file, place.line, place.function, place.source, place.why + " (the likeliest of several)"
            )
        return Parting(place, best.values, tuple(evidence), self._leavers(best, sides), not rivals, best.score)

    def _place(self, one: _Candidate) -> LeftAt:
        node, line = one.node, one.node.line
        if node.kind == "expression" and one.test is not None:
            line = one.test.lineno
        source = self.sources.line(node.file, line)
        return LeftAt(node.file, line, node.function, source, self._why(one))

    def _why(self, one: _Candidate) -> str:
        kind = one.node.kind
        if kind in {"for", "while"}:
            return "this loop ended earlier" if "end" in one.culprit else "this loop went on"
        if kind in {"except", "with"}:
            place = f", raised near line {one.raised_at}" if one.raised_at else ""
            return f"an exception was swallowed here{place}"
        jump = next((word for jump, word in _JUMP_WORDS.items() if _jumps(one, jump)), "")
        if jump:
            return f"its `{jump}` was taken"
        if kind == "if":
            return "this branch was taken" if "true" in one.culprit else "this branch was not taken"
        return _WHY.get(kind, "this condition went the other way")

    def _leavers(self, one: _Candidate, sides: _Sides) -> tuple[int, ...]:
        if one.test is not None and asks_for_rank(one.test) and (picked := singled_out(one.test, one.results)):
            return tuple(picked)
        if one.node.kind in {"for", "while"}:
            return _side("end", one, sides)
        if one.node.kind in {"except", "with"}:
            return _side("raise", one, sides)
        stmt = one.node.stmt
        if isinstance(stmt, ast.If):
            ends = [bool(body) and isinstance(body[-1], _JUMPS) for body in (stmt.body, stmt.orelse)]
            if ends[0] != ends[1]:
                return _side("true" if ends[0] else "false", one, sides)
        return ()

    def _fork(
        self, healthy: Sequence[Step], culprit: Sequence[Step], sides: _Sides, *, passed: bool = False
    ) -> Parting | None:
        """No statement separates the two: the line in the deepest common function where they differ, said as such."""
        last: Step | None = None
        if not healthy or not culprit:  # one has ended: where the others are is where it came by
            last = (healthy or culprit)[-1]
        for one, other in zip(healthy, culprit, strict=False):
            if (one.file, one.function) != (other.file, other.function):
                break
            last = one if passed else other
            if one.line != other.line:
                break
        if last is None:
            return None
        same = tuple(healthy) == tuple(culprit)
        why = "the same call on all ranks" if same else _PASSED if passed else _APART
        source = self.sources.line(last.file, last.line)
        place = LeftAt(last.file, last.line, last.function, source, why)
        return Parting(place, self.unlike(last, sides) if same else {}, (), (), sure=same, score=0.0)

    def unlike(self, step: Step, sides: _Sides) -> dict[int, str]:
        """Variables used in a line that differ between ranks, as texts."""
        stmt = self.sources.statement(step.file, step.line)
        used = dict.fromkeys(name for part in (head(stmt) if stmt else []) for name in names(part))
        found: dict[int, list[str]] = {}
        ranks = [rank for side in sides for rank in side]
        for name in used:
            texts = {rank: self.states[rank].values(step.file, step.function).get(name) for rank in ranks}
            if len({text for text in texts.values() if text is not None}) > 1:
                for rank, text in texts.items():
                    if text is not None:
                        found.setdefault(rank, []).append(f"{name} = {text}")
        return {rank: ", ".join(parts[:3]) for rank, parts in found.items()}


def _counters(loop: ast.For) -> list[ast.Name]:
    """The variables of a loop that only count its trips."""
    over = called(loop.iter) if isinstance(loop.iter, ast.Call) else ""
    if over == "range" and isinstance(loop.target, ast.Name):
        return [loop.target]
    if over == "enumerate" and isinstance(loop.target, ast.Tuple) and isinstance(loop.target.elts[0], ast.Name):
        return [loop.target.elts[0]]
    return []


def _ends_process(node: ast.AST) -> TypeGuard[ast.If]:
    if not isinstance(node, ast.If):
        return False
    return any(called(call) in _ENDS for stmt in node.body if isinstance(stmt, ast.Expr) for call, _ in calls([stmt]))


def _never_begun(one: _Candidate, before: Sequence[Step]) -> float:
    """Points off for a loop that would have had to end before its first trip: a way out ahead of it is likelier."""
    stmt = one.node.stmt
    if one.node.kind != "for" or not isinstance(stmt, ast.stmt) or one.counted:
        return 0.0
    inside = any(
        step.file == one.node.file and stmt.lineno <= step.line <= (stmt.end_lineno or stmt.lineno) for step in before
    )
    return 0.0 if inside else 1.5


def _passed(flow: Flow, starts: Sequence[Node]) -> bool:
    """Whether the way to the culprit leads through where the healthy ranks are: every way, or one with no way back."""
    healthy, culprit = flow.ends[1], flow.ends[2]
    if not _forward(starts, healthy) & culprit:
        return bool(culprit)
    return bool(_forward(_after_all(healthy), set()) & culprit) and not _forward(_after_all(culprit), set()) & healthy


def _agreement(results: Mapping[int, bool | None], sides: _Sides, labels: tuple[set[str], set[str]]) -> tuple[int, int]:
    """For how many of the two sides a condition's values agree with the way taken, and for how many they do not."""
    agreed = contrary = 0
    for ranks, ways in zip(sides, labels, strict=True):
        wanted = {_truth_of(way) for way in ways}
        known = [results[rank] for rank in ranks if results[rank] is not None]
        if not known or len(wanted) != 1 or None in wanted:
            continue
        right = sum(result in wanted for result in known)
        agreed += right * 2 > len(known)
        contrary += right * 2 <= len(known)
    return agreed, contrary


def _rank_points(test: ast.expr, contrary: int) -> float:
    """What a condition's names say for its being one that goes by rank."""
    if asks_for_rank(test) and not contrary:
        return 3.0
    if is_rank_local(test):
        return 1.5
    return -1.5 if {name.lower() for name in names(test)} <= _SAME_EVERYWHERE else 0.0


def _inside(frames: Sequence[Frame], node: Node) -> bool:
    lines = {one.line for one in node.trying}
    return any(frame.file == node.file and frame.line in lines for frame in frames)


def _range_arguments(loop: ast.For | ast.AsyncFor) -> list[ast.AST]:
    """All that is in the arguments of range()."""
    found = [call for call, _ in calls([loop.iter]) if called(call) == "range"]
    return [part for call in found for argument in call.args for part in ast.walk(argument)]


def _is_tensor(text: str) -> bool:
    return text.startswith(("tensor", "Tensor", "Parameter")) or "(" in text


def _other(label: str) -> str:
    return {"true": "false", "false": "true"}.get(label, "")


def _truth_of(label: str) -> bool | None:
    return {"true": True, "body": True, "false": False, "end": False}.get(label)


def _side(label: str, one: _Candidate, sides: _Sides) -> tuple[int, ...]:
    if label in one.culprit and label not in one.healthy:
        return sides[1]
    if label in one.healthy and label not in one.culprit:
        return sides[0]
    return ()


def _jumps(one: _Candidate, jump: type[ast.stmt]) -> bool:
    """Whether the culprit's branch of an if ends with this jump."""
    stmt = one.node.stmt
    if not isinstance(stmt, ast.If):
        return False
    for label, body in (("true", stmt.body), ("false", stmt.orelse)):
        if label in one.culprit and label not in one.healthy and body and isinstance(body[-1], jump):
            return True
    return False


def _after(node: Node) -> list[Node]:
    return [other for _, other in node.ways]


def _after_all(nodes: Iterable[Node]) -> list[Node]:
    return [other for node in nodes for other in _after(node)]


def _forward(starts: Iterable[Node], stops: set[Node]) -> set[Node]:
    """All that can follow, up to and with the stops."""
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stops:
            todo.extend(_after(node))
    return seen


class _Search:
    """Finds the places between a start and two ends where the ways to them part."""

    def __init__(self, flow: Flow, sides: _Sides) -> None:
        self.flow = flow
        self.sides = sides
        self.healthy, self.culprit = flow.ends[1], flow.ends[2]
        self.into: dict[Node, list[Node]] = {}
        for node in flow.nodes:
            for _, other in node.ways:
                self.into.setdefault(other, []).append(node)

    def _backward(self, goals: set[Node], without: set[Node]) -> set[Node]:
        seen: set[Node] = set()
        todo = [node for node in goals if node not in without]
        while todo:
            node = todo.pop()
            if node in seen or node in without:
                continue
            seen.add(node)
            todo.extend(self.into.get(node, ()))
        return seen

    def between(self, starts: Sequence[Node]) -> list[_Candidate]:
        """Decisions on the way from the last common place to both ends."""
        to_healthy = self._backward(self.healthy, self.culprit)
        to_culprit = self._backward(self.culprit, self.healthy)
        near = _forward(starts, self.healthy | self.culprit)
        thrown = _forward([*starts, *(one for node in near for one in node.raises)], self.healthy | self.culprit)
        found: list[_Candidate] = []
        for node in self.flow.nodes:
            if node not in thrown or node.kind in {"do", "joint", "except", "with"} or len(node.ways) < 2:
                continue
            one = self._decision(node, to_healthy, to_culprit)
            if one is not None:
                found.append(one)
        handlers = self._handlers(near, to_healthy, to_culprit)
        return self._without_raises(found, handlers) + handlers

    def _decision(self, node: Node, to_healthy: set[Node], to_culprit: set[Node]) -> _Candidate | None:
        ways = [(label, other in to_healthy, other in to_culprit, other) for label, other in node.ways]
        parts = any(
            h1 and c2 and (not c1 or not h2) and n1 is not n2 for _, h1, c1, n1 in ways for _, h2, c2, n2 in ways
        )
        if not parts:
            return None
        only_healthy = {label for label, h, c, _ in ways if h and not c}
        only_culprit = {label for label, h, c, _ in ways if c and not h}
        healthy = only_healthy or {label for label, h, _, _ in ways if h} - only_culprit
        culprit = only_culprit or {label for label, _, c, _ in ways if c} - only_healthy
        return _Candidate(node, healthy, culprit, bool(only_healthy and only_culprit))

    def _handlers(self, near: set[Node], to_healthy: set[Node], to_culprit: set[Node]) -> list[_Candidate]:
        found = []
        for node in self.flow.nodes:
            if node.kind not in {"except", "with"} or not node.trying:
                continue
            trying = node.trying & near
            body = _forward([node], set()) if node.kind == "except" else set()
            inside = {one for one in body if _within(one, node)}
            for goal, to_goal, to_other, labels in (
                (self.culprit, to_culprit, to_healthy, ({""}, {"raise"})),
                (self.healthy, to_healthy, to_culprit, ({"raise"}, {""})),
            ):
                if node in to_goal and trying & to_other:
                    one = _Candidate(node, set(labels[0]), set(labels[1]), node not in to_other)
                    if goal & inside:
                        (one.culprit if goal is self.culprit else one.healthy).add("in handler")
                    one.raised_at = self._raised_at(one)
                    found.append(one)
                    break
        return found

    def _raised_at(self, one: _Candidate) -> int | None:
        lines = {node.line for node in one.node.trying if isinstance(node.stmt, ast.Raise)}
        return min(lines) if len(lines) == 1 else None

    def _without_raises(self, found: list[_Candidate], handlers: list[_Candidate]) -> list[_Candidate]:
        """Leave out conditions that only lead to a raise which a handler swallows: the handler is the line."""
        kept = []
        for one in found:
            covered = [handler for handler in handlers if one.node in handler.node.trying]
            stmt = one.node.stmt
            bodies = [*stmt.body[-1:], *stmt.orelse[-1:]] if isinstance(stmt, ast.If) else []
            if covered and (any(isinstance(last, ast.Raise) for last in bodies) or isinstance(stmt, ast.Assert)):
                continue
            kept.append(one)
        return kept

    def first(self, starts: Sequence[Node]) -> list[_Candidate]:
        """Decisions that part the ways when they are come by once: in a recursion, later ones would join them again."""
        near = _forward(starts, self.healthy | self.culprit)
        found = []
        for node in self.flow.nodes:
            if node not in near or node.kind not in {"if", "match"} or len(node.ways) < 2:
                continue
            stops = {node} | self.healthy | self.culprit
            ahead = {label: _forward([other], stops) for label, other in node.ways}
            healthy = {label for label, nodes in ahead.items() if nodes & self.healthy}
            culprit = {label for label, nodes in ahead.items() if nodes & self.culprit}
            if healthy and culprit and healthy != culprit:
                one = _Candidate(node, healthy - culprit or healthy, culprit - healthy or culprit, forced=False)
                found.append(one)
        return found

    def around(self, starts: Sequence[Node]) -> list[_Candidate]:
        """Decisions of a loop that skip the very call at which all ranks are, in unlike trips."""
        goals = self.healthy & self.culprit
        near = _forward(starts, goals)
        found = []
        for node in self.flow.nodes:
            if node not in near or node.kind not in {"if", "match", "expression"} or len(node.ways) < 2:
                continue
            reach = {label: _forward([other], {node}) & goals for label, other in node.ways}
            taking = {label for label, hit in reach.items() if hit}
            skipping = {label for label, _ in node.ways} - taking
            if taking and skipping:
                found.append(_Candidate(node, taking, skipping, forced=False))
        return found


def _within(node: Node, handler: Node) -> bool:
    stmt = handler.stmt
    if not isinstance(stmt, ast.ExceptHandler):
        return False
    inside = {id(one) for one in ast.walk(stmt)}
    return id(node.stmt) in inside or (node.file == handler.file and stmt.lineno < node.line <= (stmt.end_lineno or 0))


def left_at(
    healthy: Sequence[Frame],
    culprit: Sequence[Frame],
    read: Callable[[str], str | None],
    *,
    before: Sequence[Frame] | None = None,
    states: Mapping[int, State] | None = None,
    healthy_ranks: Iterable[int] = (),
    culprit_ranks: Iterable[int] = (),
) -> tuple[LeftAt | None, dict[int, str]]:
    """The line where the ways to two places part, and what its condition was by rank.

    Args:
        healthy: the stack of the healthy ranks, innermost first; empty: they have ended.
        culprit: the culprit's, the same.
        read: the text of a file.
        before: the stack of the last collective they had in common.
        states: for values of variables.
        healthy_ranks: who is there.
        culprit_ranks: the same.

    """
    found = Locator(read, states or {}).part(before, healthy, culprit, healthy_ranks, culprit_ranks)
    return (None, {}) if found is None else (found.left_at, found.values)


__all__ = ["UNKNOWN", "Locator", "Parting", "left_at", "own"]
