"""How much speaks for each decision by which ranks can have parted: points for what its variables and its form say."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from instep.guard.conditions import asks_for_rank, is_rank_local, names, truth, value_of
from instep.guard.search import JUMPS, Candidate, Sides, jumps
from instep.guard.syntax import called, calls, condition, counters_of, head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.guard.alignment import State
    from instep.guard.flow import Node, Step
    from instep.guard.records import Frame
    from instep.guard.sources import Sources

_SAME_EVERYWHERE = {
    "args", "cfg", "config", "epoch", "global_step", "i", "it", "iteration", "len", "n", "range", "step",
}  # fmt: skip


class Scales:
    """Weighs decisions by what is known of the ranks.

    Args:
        sources: the user's files.
        states: of all ranks, for the values of their variables.

    """

    def __init__(self, sources: Sources, states: Mapping[int, State]) -> None:
        self.sources = sources
        self.states = states
        self.size = len(states)

    def order(self, found: list[Candidate], sides: Sides, before: Sequence[Step]) -> None:
        """Give each decision its points, and put the likeliest first.

        Args:
            found: the decisions.
            sides: who is where.
            before: the last place that both sides had in common.

        """
        for one in found:
            self._weigh(one, sides, found)
            one.score -= _never_begun(one, before)
        found.sort(key=lambda one: -one.score)

    def _weigh(self, one: Candidate, sides: Sides, every: Sequence[Candidate]) -> None:
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

    def _weigh_condition(self, one: Candidate, sides: Sides) -> None:
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
        if isinstance(one.node.stmt, ast.If) and any(jumps(one, jump) for jump in JUMPS):
            one.score += 0.5
        differ = len({result for result in one.results.values() if result is not None}) > 1
        one.score += (6.0 if agreed == 2 and differ else 1.5 * agreed) - (1.0 if later else 3.0) * contrary
        if differ and not contrary and agreed < 2:
            one.score += 2.0
        one.score += _rank_points(one.test, contrary)
        self._say_values(one, sides, labels)

    def _take_test(self, one: Candidate) -> tuple[set[str], set[str]]:
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
            for part in counters_of(loop)
        }
        used = set(names(test))
        return bool(used) and used <= counters | _SAME_EVERYWHERE and bool(used & (counters | {"step", "epoch"}))

    def _say_values(self, one: Candidate, sides: Sides, labels: tuple[set[str], set[str]]) -> None:
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

    def _weigh_trips(self, one: Candidate, sides: Sides, every: Sequence[Candidate]) -> None:
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
        breaks = [other for other in every if other.node.kind == "if" and jumps(other, ast.Break)]
        if going and left and max(left) < min(going) and breaks and self._ends_alike(loop, one.node, sides):
            one.score -= 7.0

    def _ends_alike(self, loop: ast.For | ast.AsyncFor, node: Node, sides: Sides) -> bool:
        """Whether a loop's own end is the same on all ranks, range(8) say, so that it cannot have ended by itself."""
        for call, _ in calls([loop.iter]):
            if called(call) == "range" and not any(True for _ in calls(call.args)):
                texts = {tuple(sorted(self._fixed(call, node, rank).items())) for side in sides for rank in side}
                return len(texts) == 1
        return False

    def _fixed(self, call: ast.Call, node: Node, rank: int) -> dict[str, str]:
        values = self._values(node, rank)
        return {name: values.get(name, "") for arg in call.args for name in names(arg)}

    def _weigh_handler(self, one: Candidate, sides: Sides) -> None:
        handler = one.node.stmt
        one.score = 2.0 if one.forced else 1.5
        if isinstance(handler, ast.ExceptHandler):
            if any(isinstance(stmt, JUMPS) for stmt in handler.body):
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


def _never_begun(one: Candidate, before: Sequence[Step]) -> float:
    """Points off for a loop that would have had to end before its first trip: a way out ahead of it is likelier."""
    stmt = one.node.stmt
    if one.node.kind != "for" or not isinstance(stmt, ast.stmt) or one.counted:
        return 0.0
    inside = any(
        step.file == one.node.file and stmt.lineno <= step.line <= (stmt.end_lineno or stmt.lineno) for step in before
    )
    return 0.0 if inside else 1.5


def _agreement(results: Mapping[int, bool | None], sides: Sides, labels: tuple[set[str], set[str]]) -> tuple[int, int]:
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
