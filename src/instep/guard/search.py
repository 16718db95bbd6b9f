"""The decisions in a program's flow by which the ways to two places can have parted."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instep.guard.flow import Flow, Node
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # the ranks that are healthy, and the others
JUMPS = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass
class Candidate:
    """A decision, and what speaks for it."""

    node: Node
    healthy: set[str]  # labels of the ways to where the healthy ranks are
    culprit: set[str]
    forced: bool
    score: float = 0.0
    test: ast.expr | None = None
    results: dict[int, bool | None] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    raised_at: int | None = None
    counted: bool = False  # the trips of a loop are known on both sides


def jumps(one: Candidate, jump: type[ast.stmt]) -> bool:
    """Whether the culprit's branch of an if ends with this jump."""
    stmt = one.node.stmt
    if not isinstance(stmt, ast.If):
        return False
    for label, body in (("true", stmt.body), ("false", stmt.orelse)):
        if label in one.culprit and label not in one.healthy and body and isinstance(body[-1], jump):
            return True
    return False


def after(node: Node) -> list[Node]:
    """What can follow a node."""
    return [other for _, other in node.ways]


def after_all(nodes: Iterable[Node]) -> list[Node]:
    """What can follow any of some nodes."""
    return [other for node in nodes for other in after(node)]


def forward(starts: Iterable[Node], stops: set[Node]) -> set[Node]:
    """All that can follow, up to and with the stops."""
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stops:
            todo.extend(after(node))
    return seen


class Search:
    """Finds the places between a start and two ends where the ways to them part."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
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

    def between(self, starts: Sequence[Node]) -> list[Candidate]:
        """Decisions on the way from the last common place to both ends."""
        to_healthy = self._backward(self.healthy, self.culprit)
        to_culprit = self._backward(self.culprit, self.healthy)
        near = forward(starts, self.healthy | self.culprit)
        thrown = forward([*starts, *(one for node in near for one in node.raises)], self.healthy | self.culprit)
        found: list[Candidate] = []
        for node in self.flow.nodes:
            if node not in thrown or node.kind in {"do", "joint", "except", "with"} or len(node.ways) < 2:
                continue
            one = self._decision(node, to_healthy, to_culprit)
            if one is not None:
                found.append(one)
        handlers = self._handlers(near, to_healthy, to_culprit)
        return self._without_raises(found, handlers) + handlers

    def _decision(self, node: Node, to_healthy: set[Node], to_culprit: set[Node]) -> Candidate | None:
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
        return Candidate(node, healthy, culprit, bool(only_healthy and only_culprit))

    def _handlers(self, near: set[Node], to_healthy: set[Node], to_culprit: set[Node]) -> list[Candidate]:
        found = []
        for node in self.flow.nodes:
            if node.kind not in {"except", "with"} or not node.trying:
                continue
            trying = node.trying & near
            body = forward([node], set()) if node.kind == "except" else set()
            inside = {one for one in body if _within(one, node)}
            for goal, to_goal, to_other, labels in (
                (self.culprit, to_culprit, to_healthy, ({""}, {"raise"})),
                (self.healthy, to_healthy, to_culprit, ({"raise"}, {""})),
            ):
                if node in to_goal and trying & to_other:
                    one = Candidate(node, set(labels[0]), set(labels[1]), node not in to_other)
                    if goal & inside:
                        (one.culprit if goal is self.culprit else one.healthy).add("in handler")
                    one.raised_at = self._raised_at(one)
                    found.append(one)
                    break
        return found

    def _raised_at(self, one: Candidate) -> int | None:
        lines = {node.line for node in one.node.trying if isinstance(node.stmt, ast.Raise)}
        return min(lines) if len(lines) == 1 else None

    def _without_raises(self, found: list[Candidate], handlers: list[Candidate]) -> list[Candidate]:
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

    def first(self, starts: Sequence[Node]) -> list[Candidate]:
        """Decisions that part the ways when they are come by once: in a recursion, later ones would join them again."""
        near = forward(starts, self.healthy | self.culprit)
        found = []
        for node in self.flow.nodes:
            if node not in near or node.kind not in {"if", "match"} or len(node.ways) < 2:
                continue
            stops = {node} | self.healthy | self.culprit
            ahead = {label: forward([other], stops) for label, other in node.ways}
            healthy = {label for label, nodes in ahead.items() if nodes & self.healthy}
            culprit = {label for label, nodes in ahead.items() if nodes & self.culprit}
            if healthy and culprit and healthy != culprit:
                one = Candidate(node, healthy - culprit or healthy, culprit - healthy or culprit, forced=False)
                found.append(one)
        return found

    def around(self, starts: Sequence[Node]) -> list[Candidate]:
        """Decisions of a loop that skip the very call at which all ranks are, in unlike trips."""
        goals = self.healthy & self.culprit
        near = forward(starts, goals)
        found = []
        for node in self.flow.nodes:
            if node not in near or node.kind not in {"if", "match", "expression"} or len(node.ways) < 2:
                continue
            reach = {label: forward([other], {node}) & goals for label, other in node.ways}
            taking = {label for label, hit in reach.items() if hit}
            skipping = {label for label, _ in node.ways} - taking
            if taking and skipping:
                found.append(Candidate(node, taking, skipping, forced=False))
        return found


def _within(node: Node, handler: Node) -> bool:
    stmt = handler.stmt
    if not isinstance(stmt, ast.ExceptHandler):
        return False
    inside = {id(one) for one in ast.walk(stmt)}
    return id(node.stmt) in inside or (node.file == handler.file and stmt.lineno < node.line <= (stmt.end_lineno or 0))
