"""The flow of control through the user's functions: which statements can follow which, and where ways part.

A program is walked along the stacks that are known: where a stack goes on into a function of the user, that function's
flow is laid in at the call. So one graph holds the ways of several ranks, through loops, handlers and calls.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.guard.syntax import (
    COMPREHENSIONS,
    ENDS,
    called,
    calls,
    head,
    is_entry_guard,
    name_of,
    own_end,
    statements,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.guard.sources import Scope, Sources


@dataclass(frozen=True)
class Step:
    """One of the user's frames in a stack.

    Attributes:
        file: its file.
        function: the code's own name.
        line: where it is.
        calls: names of the functions between it and the user's next frame inwards, nearest first.
        engine: whether a library lies between it and its caller that may call it any number of times.

    """

    file: str
    function: str
    line: int
    calls: tuple[str, ...] = ()
    engine: bool = False


@dataclass(eq=False)
class Node:
    """One point of the flow.

    Attributes:
        kind: "if", "while", "for", "match", "assert", "expression", "except", "with" for places where ways part;
            "do" for a statement; "joint" for the rest.
        line: of the statement.
        file: its file.
        function: its name.
        stmt: the syntax tree.
        ways: what can follow: (label, node); labels of decisions: "true", "false", "body", "end", "case N".
        trying: for "except": the statements inside the try.
        raises: handlers that an error here may lead to.

    """

    kind: str
    line: int
    file: str
    function: str
    stmt: ast.AST | None = None
    ways: list[tuple[str, Node]] = field(default_factory=list)
    trying: set[Node] = field(default_factory=set)
    raises: tuple[Node, ...] = ()

    def to(self, other: Node, label: str = "") -> Node:
        """Add a way."""
        self.ways.append((label, other))
        return self


@dataclass
class _Context:
    """What leaves the statements that are being laid out."""

    returns: Node
    breaks: Node | None = None
    continues: Node | None = None
    raises: tuple[Node, ...] = ()
    unwinds: Node | None = None  # where an error goes after all handlers here, through `finally`
    tries: tuple[set[Node], ...] = ()


@dataclass(eq=False)
class _Way:
    """A stack that is laid in: its steps, and the nodes where it ends."""

    steps: tuple[Step, ...]
    ends: set[Node] = field(default_factory=set)


class Flow:
    """The flow of control along several stacks that begin in the same function.

    Args:
        sources: the user's files.
        stacks: each outermost first; an empty one stands for a program that has ended.

    Attributes:
        entry: where the program begins.
        exit: where it ends.
        ends: for each stack the nodes where it is.

    """

    _LIMIT = 12_000  # nodes: no program that people write is larger along a few stacks

    def __init__(self, sources: Sources, stacks: Sequence[Sequence[Step]]) -> None:
        self.sources = sources
        self.nodes: list[Node] = []
        self._ways = [_Way(tuple(one)) for one in stacks]
        self.exit = self.add(Node("joint", 0, "", ""))
        filled = [way for way in self._ways if way.steps]
        first = filled[0].steps[0] if filled else None
        self.entry = self.exit
        if first is not None:
            together = [way for way in filled if _same(way.steps[0], first)]
            self.entry = self.scope(together, 0, _Context(self.exit))
        for way in self._ways:
            if not way.steps:
                way.ends.add(self.exit)
        self.ends = [way.ends for way in self._ways]

    # Functions

    def add(self, node: Node) -> Node:
        """Take in a node."""
        if len(self.nodes) > self._LIMIT:
            raise RecursionError
        self.nodes.append(node)
        return node

    def scope(self, ways: list[_Way], depth: int, context: _Context) -> Node:
        """Lay out the function in which all these stacks are at this depth; its first node."""
        step = ways[0].steps[depth]
        scope = self.sources.scope(step.file, step.function, step.line)
        here = _Layout(self, step, ways, depth)
        if scope is None:
            return here.unknown(context.returns, context)
        body: list[ast.stmt] = (
            [ast.copy_location(ast.Expr(scope.body), scope.body)] if isinstance(scope, ast.Lambda) else scope.body
        )
        here.choose(scope, body)
        return here.block(body, context.returns, context)


def _same(one: Step, other: Step) -> bool:
    return (one.file, one.function) == (other.file, other.function)


class _Layout:
    """Lays out one function."""

    def __init__(self, flow: Flow, step: Step, ways: list[_Way], depth: int) -> None:
        self.flow = flow
        self.step = step
        self.ways = ways
        self.depth = depth
        self.at: dict[int, list[_Way]] = {}  # id of a statement -> the stacks that are at it

    def node(self, kind: str, stmt: ast.AST | None, line: int | None = None) -> Node:
        at = line if line is not None else getattr(stmt, "lineno", self.step.line)
        return self.flow.add(Node(kind, at, self.step.file, self.step.function, stmt))

    def choose(self, scope: Scope, body: list[ast.stmt]) -> None:
        """Find for each stack the statement of this function that it is at."""
        every = list(statements(body))
        for way in self.ways:
            step = way.steps[self.depth]
            near = [one for one in every if one.lineno <= step.line <= own_end(one)]
            deeper = way.steps[self.depth + 1].function if len(way.steps) > self.depth + 1 else ""
            wanted = {*step.calls, deeper} - {""}
            named = [one for one in near if any(called(call) in wanted for call, _ in calls(head(one)))]
            calling = [one for one in near if any(True for _ in calls(head(one)))]
            pick = (named or calling or near)[-1:]
            if not pick and scope is not None:  # an unusual line, such as a handler's head
                before = [one for one in every if one.lineno <= step.line]
                pick = before[-1:] or every[:1]
            for one in pick:
                self.at.setdefault(id(one), []).append(way)

    def unknown(self, after: Node, context: _Context) -> Node:
        """A function whose source is not there: all stacks are at one node of it."""
        node = self.node("do", None)
        self.at[id(None)] = self.ways
        begin = self._call(node, self.ways, after, context, maybe=False)
        node.kind = "do"  # nothing can be said of a decision here
        return begin

    # Statements, from the last to the first

    def block(self, body: Sequence[ast.stmt], after: Node, context: _Context) -> Node:
        for stmt in reversed(body):
            after = self.statement(stmt, after, context)
        return after

    def statement(self, stmt: ast.stmt, after: Node, context: _Context) -> Node:  # noqa: C901, PLR0911
        if isinstance(stmt, ast.If):
            return self._if(stmt, after, context)
        if isinstance(stmt, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(stmt, after, context)
        if isinstance(stmt, ast.Try) or type(stmt).__name__ == "TryStar":
            return self._try(stmt, after, context)  # type: ignore[arg-type]
        if isinstance(stmt, (ast.With, ast.AsyncWith)):
            return self._with(stmt, after, context)
        if isinstance(stmt, ast.Match):
            return self._match(stmt, after, context)
        if isinstance(stmt, ast.Return):
            return self.plain(stmt, context.returns, context)
        if isinstance(stmt, ast.Break):
            return self.plain(stmt, context.breaks or after, context)
        if isinstance(stmt, ast.Continue):
            return self.plain(stmt, context.continues or after, context)
        if isinstance(stmt, ast.Raise):
            return self._raise(stmt, context)
        if isinstance(stmt, ast.Assert):
            node = self.node("assert", stmt)
            self._track(node, context)
            node.to(after, "true")
            for handler in context.raises:
                node.to(handler, "false")
            return self._before(stmt, [stmt.test], node, context)
        if isinstance(stmt, ast.ClassDef):
            return self.block(stmt.body, after, context)
        return self.plain(stmt, after, context)

    def plain(self, stmt: ast.stmt, after: Node, context: _Context) -> Node:
        parts = head(stmt)
        names = [called(call) for call, _ in calls(parts)]
        if any(name in ENDS for name in names):
            after = context.unwinds or self.flow.exit
        node = self.node("do", stmt)
        self._track(node, context)
        here = self.at.get(id(stmt), [])
        return self._call(node, here, after, context, maybe=self._maybe(parts, here))

    def _before(self, stmt: ast.AST, parts: list[ast.AST], then: Node, context: _Context) -> Node:
        """What happens in the head of a compound statement, where a stack is inside it."""
        here = self.at.get(id(stmt), [])
        if not here:
            return then
        node = self.node("do", stmt)
        self._track(node, context)
        return self._call(node, here, then, context, maybe=self._maybe(parts, here))

    def _maybe(self, parts: list[ast.AST], ways: list[_Way]) -> bool:
        """Whether the statement makes the call that these stacks are in only under a condition."""
        wanted = {name for way in ways for name in self._names(way)}
        found = list(calls(parts))
        named = [maybe for call, maybe in found if called(call) in wanted] or [maybe for _, maybe in found]
        return bool(named) and all(named)

    def _names(self, way: _Way) -> set[str]:
        step = way.steps[self.depth]
        deeper = way.steps[self.depth + 1].function if len(way.steps) > self.depth + 1 else ""
        return {*step.calls, deeper} - {""}

    def _call(self, node: Node, ways: list[_Way], after: Node, context: _Context, *, maybe: bool) -> Node:
        """Lay in what the stacks at this statement are inside of."""
        starts, exits, engine = self._inlined(node, ways, context)
        if not starts:
            return node.to(after)
        several = len(starts) > 1
        engine = engine or self._repeats(node, ways)
        if maybe or several or engine:
            node.kind = "expression"
        for at, start in enumerate(starts):
            node.to(start, f"call {at}" if several else "call")
        if maybe or engine:
            node.to(after, "skip")
        for at, end in enumerate(exits):
            end.to(after)
            if engine:
                end.to(node)
            for other in starts[:at] + starts[at + 1 :] if several and not engine else ():
                end.to(other)
        return node

    def _inlined(self, node: Node, ways: list[_Way], context: _Context) -> tuple[list[Node], list[Node], bool]:
        """What is called at a node: its beginnings and ends, and whether a library may call it again."""
        ending = [way for way in ways if len(way.steps) == self.depth + 1]
        groups: list[list[_Way]] = []
        for way in ways:
            if way in ending:
                continue
            step = way.steps[self.depth + 1]
            fit = [one for one in groups if self._same_scope(one[0].steps[self.depth + 1], step)]
            if fit:
                fit[0].append(way)
            else:
                groups.append([way])
        starts: list[Node] = []
        exits: list[Node] = []
        if ending:
            target = self.node("do", node.stmt, node.line)
            self._track(target, context)
            for way in ending:
                way.ends.add(target)
            starts.append(target)
            exits.append(target)
        for group in groups:
            done = self.node("joint", None, node.line)
            inner = _Context(done, None, None, context.raises, context.unwinds, context.tries)
            starts.append(self.flow.scope(group, self.depth + 1, inner))
            exits.append(done)
        return starts, exits, any(way.steps[self.depth + 1].engine for group in groups for way in group)

    def _repeats(self, node: Node, ways: list[_Way]) -> bool:
        """Whether the call is made for each element of a comprehension, or by a builtin such as map()."""
        wanted = {name for way in ways for name in self._names(way)}
        parts = head(node.stmt) if node.stmt is not None else []
        loops = [one for part in parts for one in ast.walk(part) if isinstance(one, COMPREHENSIONS)]
        if any(called(call) in wanted for loop in loops for call, _ in calls([loop])):
            return True
        handed = {name_of(argument) for call, _ in calls(parts) for argument in call.args}
        direct = [way for way in ways if not way.steps[self.depth].calls and len(way.steps) > self.depth + 1]
        return any(way.steps[self.depth + 1].function in handed - {""} for way in direct)

    def _same_scope(self, one: Step, other: Step) -> bool:
        if not _same(one, other):
            return False
        sources = self.flow.sources
        return sources.scope(one.file, one.function, one.line) is sources.scope(other.file, other.function, other.line)

    def _track(self, node: Node, context: _Context) -> None:
        node.raises = context.raises
        for one in context.tries:
            one.add(node)

    def _if(self, stmt: ast.If, after: Node, context: _Context) -> Node:
        if is_entry_guard(stmt.test):
            return self.block(stmt.body, after, context)
        node = self.node("if", stmt)
        self._track(node, context)
        node.to(self.block(stmt.body, after, context), "true")
        node.to(self.block(stmt.orelse, after, context), "false")
        return self._before(stmt, [stmt.test], node, context)

    def _loop(self, stmt: ast.For | ast.AsyncFor | ast.While, after: Node, context: _Context) -> Node:
        node = self.node("while" if isinstance(stmt, ast.While) else "for", stmt)
        self._track(node, context)
        begin = self._before(stmt, head(stmt), node, context)
        again = begin
        inner = _Context(context.returns, after, again, context.raises, context.unwinds, context.tries)
        node.to(self.block(stmt.body, again, inner), "body")
        if not (isinstance(stmt, ast.While) and isinstance(stmt.test, ast.Constant) and stmt.test.value):
            node.to(self.block(stmt.orelse, after, context), "end")
        return begin

    def _match(self, stmt: ast.Match, after: Node, context: _Context) -> Node:
        node = self.node("match", stmt)
        self._track(node, context)
        full = False
        for case in stmt.cases:
            node.to(self.block(case.body, after, context), f"case {case.pattern.lineno}")
            full = full or (isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and not case.guard)
        if not full:
            node.to(after, "none")
        return self._before(stmt, [stmt.subject], node, context)

    def _with(self, stmt: ast.With | ast.AsyncWith, after: Node, context: _Context) -> Node:
        inner = context
        makers = [called(call) for call, _ in calls(head(stmt))] + [
            one.context_expr.id for one in stmt.items if isinstance(one.context_expr, ast.Name)
        ]
        if "suppress" in makers or any(self.flow.sources.swallows(self.step.file, name) for name in makers):
            handler = self.node("with", stmt)
            handler.to(after)
            inner = _Context(
                context.returns,
                context.breaks,
                context.continues,
                (handler,),
                context.unwinds,
                (*context.tries, handler.trying),
            )
        body = self.block(stmt.body, after, inner)
        node = self.node("do", stmt)
        self._track(node, context)
        return self._call(node, self.at.get(id(stmt), []), body, context, maybe=False)

    def _raise(self, stmt: ast.Raise, context: _Context) -> Node:
        node = self.node("do", stmt)
        self._track(node, context)
        kind = ast.unparse(stmt.exc) if stmt.exc is not None else ""
        if kind.startswith("SystemExit"):
            return node.to(context.unwinds or self.flow.exit)
        for handler in context.raises:
            node.to(handler, "raise")
        if not context.raises:
            node.to(context.unwinds or self.flow.exit, "raise")
        return node

    def _try(self, stmt: ast.Try, after: Node, context: _Context) -> Node:
        outer = context
        if stmt.finalbody:  # laid out once for each way of leaving
            after = self.block(stmt.finalbody, after, context)
            outer = _Context(
                self.block(stmt.finalbody, context.returns, context),
                self.block(stmt.finalbody, context.breaks, context) if context.breaks else None,
                self.block(stmt.finalbody, context.continues, context) if context.continues else None,
                tuple(self.block(stmt.finalbody, one, context) for one in context.raises),
                self.block(stmt.finalbody, context.unwinds or self.flow.exit, context),
                context.tries,
            )
        handlers: list[Node] = []
        everything = False
        for handler in stmt.handlers:
            node = self.node("except", handler)
            node.to(self.block(handler.body, after, outer))
            handlers.append(node)
            kinds = (
                {name.id for name in ast.walk(handler.type) if isinstance(name, ast.Name)} if handler.type else set()
            )
            everything = everything or handler.type is None or bool(kinds & {"Exception", "BaseException"})
        tries = (*outer.tries, *(one.trying for one in handlers))
        raises = tuple(handlers) if everything else (*handlers, *outer.raises)
        inner = _Context(outer.returns, outer.breaks, outer.continues, raises, outer.unwinds, tries)
        orelse = self.block(stmt.orelse, after, outer)
        return self.block(stmt.body, orelse, inner)
