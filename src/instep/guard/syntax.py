"""What a statement or an expression of Python says, read from its syntax tree."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ENDS = {"exit", "quit", "_exit"}  # sys.exit(), os._exit(): calls that do not come back


def own_end(stmt: ast.stmt) -> int:
    """The last line of a statement's own part: of a compound one its head."""
    end = stmt.end_lineno or stmt.lineno
    body = getattr(stmt, "body", None) or getattr(stmt, "cases", None)
    if isinstance(stmt, ast.Match):
        return max(stmt.lineno, stmt.subject.end_lineno or stmt.lineno)
    if not body:
        return end
    first = body[0]
    start = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
    return max(stmt.lineno, start - 1) if start > stmt.lineno else stmt.lineno


def head(stmt: ast.AST) -> list[ast.AST]:
    """The expressions that a compound statement evaluates itself."""
    parts: list[ast.AST | None] = []
    if isinstance(stmt, (ast.If, ast.While)):
        parts = [stmt.test]
    elif isinstance(stmt, (ast.For, ast.AsyncFor)):
        parts = [stmt.iter]
    elif isinstance(stmt, (ast.With, ast.AsyncWith)):
        parts = [one.context_expr for one in stmt.items]
    elif isinstance(stmt, ast.Match):
        parts = [stmt.subject]
    elif isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        parts = list(stmt.decorator_list)
    elif isinstance(stmt, ast.Try):
        parts = []
    else:
        parts = [stmt]
    return [one for one in parts if one is not None]


def calls(parts: Iterable[ast.AST]) -> Iterator[tuple[ast.Call, bool]]:
    """All calls in some expressions; whether each is made under a condition."""
    todo = [(one, False) for one in parts]
    while todo:
        node, maybe = todo.pop()
        if isinstance(node, ast.Call):
            yield node, maybe
        for name, value in ast.iter_fields(node):
            below = maybe or _conditional(node, name)
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    todo.append((child, below or (isinstance(node, ast.BoolOp) and index > 0)))


def _conditional(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.IfExp):
        return name in {"body", "orelse"}
    if isinstance(node, COMPREHENSIONS):
        return name != "generators"
    return isinstance(node, ast.Lambda)


def name_of(function: ast.expr) -> str:
    """The name that a function has on a stack."""
    if isinstance(function, ast.Lambda):
        return "<lambda>"
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def called(call: ast.Call) -> str:
    """The last part of the name that a call calls."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def condition(parts: Sequence[ast.AST], names: Sequence[str]) -> tuple[ast.expr | None, str]:
    """The condition inside a statement under which a call of one of these names is made, and the label of its way."""
    best: tuple[ast.expr | None, str] = (None, "")
    for node in (child for part in parts for child in ast.walk(part)):
        options: list[tuple[ast.expr, str, list[ast.AST]]] = []
        if isinstance(node, ast.IfExp):
            options = [(node.test, "true", [node.body]), (node.test, "false", [node.orelse])]
        elif isinstance(node, ast.BoolOp):
            label = "true" if isinstance(node.op, ast.And) else "false"
            options = [(one, label, list(node.values[at + 1 :])) for at, one in enumerate(node.values[:-1])]
        elif isinstance(node, COMPREHENSIONS):
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            options = [(test, "true", list(elements)) for one in node.generators for test in one.ifs]
        for test, label, below in options:
            found = [called(call) for call, _ in calls(below)]
            if any(name in names for name in found):
                return test, label
            if found and best[0] is None:
                best = (test, label)
    return best


def is_entry_guard(test: ast.expr) -> bool:
    """Whether this is ``if __name__ == "__main__"``, which is no decision of a rank's."""
    names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
    return isinstance(test, ast.Compare) and names == {"__name__"}


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a function, in the order of the file, without those of functions defined in it."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            for part in getattr(stmt, name, ()):
                if isinstance(part, (ast.ExceptHandler, ast.match_case)):
                    yield from statements(part.body)
                elif isinstance(part, ast.stmt):
                    yield from statements([part])


def counters_of(loop: ast.For) -> list[ast.Name]:
    """The variables of a loop that only count its trips."""
    over = called(loop.iter) if isinstance(loop.iter, ast.Call) else ""
    if over == "range" and isinstance(loop.target, ast.Name):
        return [loop.target]
    if over == "enumerate" and isinstance(loop.target, ast.Tuple) and isinstance(loop.target.elts[0], ast.Name):
        return [loop.target.elts[0]]
    return []
