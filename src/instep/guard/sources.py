"""The user's files: their lines, and what is defined where."""

from __future__ import annotations

import ast
from pathlib import PurePath
from typing import TYPE_CHECKING

from instep.guard.syntax import own_end

if TYPE_CHECKING:
    from collections.abc import Callable

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Sources:
    """The user's files, each read and parsed once."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._texts: dict[str, list[str]] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def lines(self, file: str) -> list[str]:
        """The lines of a file; none where it cannot be read."""
        if file not in self._texts:
            try:
                text = self._read(file)
            except (OSError, UnicodeDecodeError, ValueError):
                text = None
            self._texts[file] = text.splitlines() if text else []
        return self._texts[file]

    def line(self, file: str, number: int) -> str:
        """One line, without the spaces around it."""
        lines = self.lines(file)
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def tree(self, file: str) -> ast.Module | None:
        """The syntax tree of a file."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse("\n".join(self.lines(file)) + "\n") if self.lines(file) else None
            except (SyntaxError, ValueError, RecursionError):
                self._trees[file] = None
        return self._trees[file]

    def scope(self, file: str, function: str, line: int) -> Scope | None:
        """The innermost function of this name around a line."""
        tree = self.tree(file)
        if tree is None or function == "<module>":
            return tree
        found: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = None
        for node in ast.walk(tree):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                and _name(node) == function
                and _covers(node, line)
            ):
                found = node if found is None or node.lineno >= found.lineno else found
        return found

    def function_at(self, file: str, line: int) -> str:
        """The name of the innermost function around a line; "" at the top level."""
        tree = self.tree(file)
        around = [
            node
            for node in ast.walk(tree or ast.Module([], []))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _covers(node, line)
        ]
        return max(around, key=lambda node: node.lineno).name if around else ""

    def bodies(self, file: str, name: str) -> list[list[ast.stmt]]:
        """The bodies of all functions of a name in a file; of a class, its first and its call."""
        tree = self.tree(file)
        found: list[list[ast.stmt]] = []
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                found.append(node.body)
            elif isinstance(node, ast.ClassDef) and node.name == name:
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                found += [one.body for one in methods if one.name in {"__init__", "__call__", "forward"}]
        return found

    def definitions(self, file: str, name: str) -> list[ast.stmt]:
        """Functions and classes of a name, in a file or in what it imports them from."""
        found: list[ast.stmt] = []
        for node in ast.walk(self.tree(file) or ast.Module([], [])):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                found.append(node)
            elif isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
                found += [one for other in self._imported(file, node) for one in _top(self.tree(other), name)]
        return found

    def _imported(self, file: str, node: ast.ImportFrom) -> list[str]:
        """The files that an import may mean: beside the importing file, or above it."""
        parts = (node.module or "").split(".") if node.module else []
        folder = PurePath(file).parent
        folders = [folder, *folder.parents[:3]] if not node.level else [folder, *folder.parents][node.level - 1 :][:1]
        tried = [str(one.joinpath(*parts).with_suffix(".py")) for one in folders if parts]
        return [one for one in tried if self.lines(one)][:1]

    def swallows(self, file: str, name: str) -> bool:
        """Whether a context manager of the user's keeps errors to itself."""
        for node in self.definitions(file, name):
            if isinstance(node, ast.ClassDef):
                leaving = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__exit__"]
                returned = [part.value for one in leaving for part in ast.walk(one) if isinstance(part, ast.Return)]
                if any(value is not None and not _is_false(value) for value in returned):
                    return True
            elif any(isinstance(part, ast.Try) and _yields_and_catches(part) for part in ast.walk(node)):
                return True
        return False

    def statement(self, file: str, line: int) -> ast.stmt | None:
        """The innermost statement whose own part, without its body, holds a line."""
        tree = self.tree(file)
        found = None
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.stmt) and node.lineno <= line <= own_end(node):
                found = node if found is None or node.lineno >= found.lineno else found
        return found


def _name(scope: Scope) -> str:
    return getattr(scope, "name", "<lambda>")


def _covers(node: ast.AST, line: int) -> bool:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
    return bool(first <= line <= (node.end_lineno or first))  # type: ignore[attr-defined]


def _top(tree: ast.Module | None, name: str) -> list[ast.stmt]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [one for one in (tree.body if tree else []) if isinstance(one, kinds) and one.name == name]


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _yields_and_catches(stmt: ast.Try) -> bool:
    """Whether a generator's try holds its yield, and a handler that does not raise again."""
    yields = any(isinstance(part, ast.Yield) for one in stmt.body for part in ast.walk(one))
    return yields and any(not isinstance(one.body[-1], ast.Raise) for one in stmt.handlers)
