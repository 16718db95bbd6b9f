"""The line where a rank left the common path: the branch, loop, handler or return between two places in the program."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.guard.alignment import own, steps
from instep.guard.conditions import asks_for_rank, names, singled_out
from instep.guard.flow import Flow
from instep.guard.search import JUMPS, Search, after, after_all, forward, jumps
from instep.guard.sources import Sources
from instep.guard.syntax import ENDS, called, calls, head
from instep.guard.verdicts import LeftAt
from instep.guard.weigh import Scales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeGuard

    from instep.guard.alignment import State
    from instep.guard.flow import Node, Step
    from instep.guard.records import Frame
    from instep.guard.search import Candidate, Sides

_JUMP_WORDS: dict[type[ast.stmt], str] = {
    ast.Continue: "continue",
    ast.Break: "break",
    ast.Return: "return",
    ast.Raise: "raise",
}
_WHY = {"match": "another case was taken here", "assert": "this assertion failed"}
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

    """

    left_at: LeftAt
    values: dict[int, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    leavers: tuple[int, ...] = ()


class Locator:
    """Finds lines; one for each verdict, so that each file is read once.

    Args:
        read: the text of a file, None where it cannot be had.
        states: of all ranks, for the values of their variables.

    """

    def __init__(self, read: Callable[[str], str | None], states: Mapping[int, State]) -> None:
        self.sources = Sources(read)
        self.states = states
        self.scales = Scales(self.sources, states)

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

    def _part(self, ways: list[tuple[Step, ...]], sides: Sides, *, shifted: bool) -> Parting | None:
        if not ways[1] and not ways[2]:
            return None
        flow = Flow(self.sources, ways)
        search = Search(flow)
        starts = [one for node in flow.ends[0] for one in after(node)] if ways[0] and flow.ends[0] else [flow.entry]
        searches = [search.between, search.first]
        if flow.ends[1] & flow.ends[2]:
            searches = [search.around] if shifted else []
        for look, begin in [*((one, starts) for one in searches), (search.between, [flow.entry])]:
            found = look(begin)
            self.scales.order(found, sides, ways[0])
            if found and found[0].score > 0:
                return self._told(found, sides)
        return (
            self._thrown(sides)
            or self._exit_elsewhere(ways, sides)
            or self._fork(ways[1], ways[2], sides, passed=_passed(flow, starts))
        )

    def _thrown(self, sides: Sides) -> Parting | None:
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
                    return Parting(place, {rank: f"{raised.kind}: {raised.text}"}, leavers=(rank,))
        return None

    def _exit_elsewhere(self, ways: Sequence[Sequence[Step]], sides: Sides) -> Parting | None:
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
        return Parting(place, leavers=left)

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
        ahead = forward(after_all(flow.ends[0]), set())
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

    # Words

    def _told(self, found: Sequence[Candidate], sides: Sides) -> Parting:
        best = found[0]
        place = self._place(best)
        rivals = [
            one
            for one in found[1:]
            if best.score - one.score < _CLEAR and (one.node.file, one.node.line) != (place.file, place.line)
        ]
        evidence: list[str] = []
        if rivals:
            others = ", ".join(f"{one.node.file}:{one.node.line}" for one in rivals[:3])
            evidence.append(f"as likely by the program's text: {others}")
            place = LeftAt(
                place.file, place.line, place.function, place.source, place.why + " (the likeliest of several)"
            )
        return Parting(place, best.values, tuple(evidence), self._leavers(best, sides))

    def _place(self, one: Candidate) -> LeftAt:
        node, line = one.node, one.node.line
        if node.kind == "expression" and one.test is not None:
            line = one.test.lineno
        source = self.sources.line(node.file, line)
        return LeftAt(node.file, line, node.function, source, self._why(one))

    def _why(self, one: Candidate) -> str:
        kind = one.node.kind
        if kind in {"for", "while"}:
            return "this loop ended earlier" if "end" in one.culprit else "this loop went on"
        if kind in {"except", "with"}:
            place = f", raised near line {one.raised_at}" if one.raised_at else ""
            return f"an exception was swallowed here{place}"
        jump = next((word for jump, word in _JUMP_WORDS.items() if jumps(one, jump)), "")
        if jump:
            return f"its `{jump}` was taken"
        if kind == "if":
            return "this branch was taken" if "true" in one.culprit else "this branch was not taken"
        return _WHY.get(kind, "this condition went the other way")

    def _leavers(self, one: Candidate, sides: Sides) -> tuple[int, ...]:
        if one.test is not None and asks_for_rank(one.test) and (picked := singled_out(one.test, one.results)):
            return tuple(picked)
        if one.node.kind in {"for", "while"}:
            return _side("end", one, sides)
        if one.node.kind in {"except", "with"}:
            return _side("raise", one, sides)
        stmt = one.node.stmt
        if isinstance(stmt, ast.If):
            ends = [bool(body) and isinstance(body[-1], JUMPS) for body in (stmt.body, stmt.orelse)]
            if ends[0] != ends[1]:
                return _side("true" if ends[0] else "false", one, sides)
        return ()

    def _fork(
        self, healthy: Sequence[Step], culprit: Sequence[Step], sides: Sides, *, passed: bool = False
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
        return Parting(place, self.unlike(last, sides) if same else {})

    def unlike(self, step: Step, sides: Sides) -> dict[int, str]:
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


def _ends_process(node: ast.AST) -> TypeGuard[ast.If]:
    if not isinstance(node, ast.If):
        return False
    return any(called(call) in ENDS for stmt in node.body if isinstance(stmt, ast.Expr) for call, _ in calls([stmt]))


def _passed(flow: Flow, starts: Sequence[Node]) -> bool:
    """Whether the way to the culprit leads through where the healthy ranks are: every way, or one with no way back."""
    healthy, culprit = flow.ends[1], flow.ends[2]
    if not forward(starts, healthy) & culprit:
        return bool(culprit)
    return bool(forward(after_all(healthy), set()) & culprit) and not forward(after_all(culprit), set()) & healthy


def _side(label: str, one: Candidate, sides: Sides) -> tuple[int, ...]:
    if label in one.culprit and label not in one.healthy:
        return sides[1]
    if label in one.healthy and label not in one.culprit:
        return sides[0]
    return ()
