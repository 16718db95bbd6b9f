"""What a condition of the user's program was on a rank, from the texts of its local variables; nothing is run."""

from __future__ import annotations

import ast
import math
import operator
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Unknown:
    """A value that cannot be had."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN: Final = _Unknown()


class _Sized:
    """A list or the like of which only the length is known."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


_RANKS = {"rank", "global_rank", "world_rank", "my_rank", "myrank", "rk", "rank_id", "process_index", "node_rank_zero"}
_RANK_CALLS = {"get_rank", "rank", "get_global_rank"}
_MAIN = {
    "is_main",
    "is_main_process",
    "is_global_zero",
    "is_master",
    "is_rank_zero",
    "is_rank0",
    "main_process",
    "is_chief",
}
_LOCAL = re.compile(
    r"rank|main|master|chief|random|rand|time|monotonic|perf_counter|exists|isfile|is_file|isdir|is_dir|stat|glob|listdir"
    r"|isfinite|isnan|isinf|nan|loss|finite|batch|data|sample|numel|empty|cache|signal|stop|hostname|host|local|skip|drop"
    r"|bad|error|fail|best|patience|metric|score|acc|grad|memory|queue|ready|warm|cold|first|seen|flag|token|mask",
    re.IGNORECASE,
)  # fmt: skip
_RANKISH = re.compile(r"(^|_)(rank|is_main|main_process|master|chief|global_zero|rank_zero)", re.IGNORECASE)
_TENSOR = re.compile(r"^(?:tensor|Parameter containing:\s*tensor)\((.*)\)$", re.DOTALL)
_ONE = re.compile(
    r"^(\S+) \((?:u?int|b?float|bfloat|complex|bool)\d*(?:_\w+)?(?:\[[\d, ]*\])?\)$"
)  # a tensor of one element
_SIZED = re.compile(r"^(?:list|tuple|set|frozenset|deque|dict) of (\d+)")
_SHAPED = re.compile(r"^(?:array )?\w+ \[([\d, ]*)\]")
_NUMBER = re.compile(r"^[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|nan|inf)$", re.IGNORECASE)

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}


def value_of(text: str) -> Any:
    """The value that a short text stands for; UNKNOWN where it is not a plain one."""
    text = text.strip()
    if match := _SIZED.match(text):
        return _Sized(int(match.group(1)))
    if match := _ONE.match(text):
        return value_of(match.group(1))
    if match := _TENSOR.match(text):
        inner = match.group(1)
        inner = inner.split(", dtype=")[0].split(", grad_fn=")[0].split(", device=")[0].split(", requires_grad=")[0]
        return value_of(inner)
    if _NUMBER.match(text):
        return float(text) if re.search(r"[.enaif]", text, re.IGNORECASE) else int(text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return UNKNOWN
    return found


def evaluate(expression: ast.expr, values: Mapping[str, str], rank: int, size: int | None = None) -> Any:
    """The value of an expression on a rank; UNKNOWN where something in it is not known.

    Args:
        expression: the syntax tree.
        values: texts of local variables by name.
        rank: which rank, for names and calls that mean it.
        size: number of ranks, the same.

    """
    try:
        return _Evaluator(values, rank, size).of(expression)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, KeyError, IndexError, AttributeError):
        return UNKNOWN


def truth(expression: ast.expr, values: Mapping[str, str], rank: int, size: int | None = None) -> bool | None:
    """Whether a condition holds on a rank; None where that is not known."""
    found = evaluate(expression, values, rank, size)
    if found is UNKNOWN:
        return None
    try:
        return bool(found)
    except (TypeError, ValueError):
        return None


class _Evaluator:
    def __init__(self, values: Mapping[str, str], rank: int, size: int | None) -> None:
        self.values = values
        self.rank = rank
        self.size = size

    def of(self, node: ast.expr) -> Any:  # noqa: C901, PLR0911, PLR0912  # one for each kind of expression
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.BinOp):
            left, right = self.of(node.left), self.of(node.right)
            function = _ARITHMETIC.get(type(node.op))
            return UNKNOWN if UNKNOWN in (left, right) or function is None else function(left, right)
        if isinstance(node, ast.IfExp):
            test = self.of(node.test)
            return UNKNOWN if test is UNKNOWN else self.of(node.body if test else node.orelse)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = [self.of(one) for one in node.elts]
            return UNKNOWN if any(one is UNKNOWN for one in parts) else tuple(parts)
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            whole = ast.unparse(node)
            if whole in self.values:
                return value_of(self.values[whole])
            if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
                return self._shape(node.value.value, node.slice)
            base, index = self.of(node.value), self.of(node.slice)
            return UNKNOWN if UNKNOWN in (base, index) else base[index]
        return UNKNOWN

    def _name(self, name: str) -> Any:
        if name in self.values:
            found = value_of(self.values[name])
            if found is not UNKNOWN:
                return found
        return self._by_name(name)

    def _by_name(self, name: str) -> Any:
        plain = name.lower().lstrip("_")
        if plain in _RANKS:
            return self.rank
        if plain in _MAIN:
            return self.rank == 0
        if plain in {"world_size", "world"} and self.size is not None:
            return self.size
        return UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Any:
        whole = ast.unparse(node)
        if whole in self.values and (found := value_of(self.values[whole])) is not UNKNOWN:
            return found
        base = ast.unparse(node.value)
        text = self.values.get(base, "")
        match = re.search(rf"[(,\s]{re.escape(node.attr)}=((?:'[^']*')|(?:\"[^\"]*\")|[^,()]+)", text)
        if match and (found := value_of(match.group(1))) is not UNKNOWN:
            return found
        return self._by_name(node.attr)

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.USub):
            return -value
        return (not value if isinstance(value, bool) else ~value) if isinstance(node.op, ast.Invert) else +value

    def _bool(self, node: ast.BoolOp) -> Any:
        stop = isinstance(node.op, ast.Or)
        known = [self.of(one) for one in node.values]
        for one in known:
            if one is not UNKNOWN and bool(one) is stop:
                return one
        return UNKNOWN if any(one is UNKNOWN for one in known) else known[-1]

    def _compare(self, node: ast.Compare) -> Any:
        left = self.of(node.left)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.of(right_node)
            if left is UNKNOWN or right is UNKNOWN:
                return UNKNOWN
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _call(self, node: ast.Call) -> Any:  # noqa: PLR0911
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
        if name in _RANK_CALLS:
            grouped = bool(node.args) or any(one.arg == "group" for one in node.keywords)
            return UNKNOWN if grouped else self.rank
        if name in _MAIN:
            return self.rank == 0
        if name in {"get_world_size", "world_size"} and not node.args and self.size is not None:
            return self.size
        method = isinstance(func, ast.Attribute)
        if (found := self._size(name, node)) is not UNKNOWN:
            return found
        given = [self.of(one) for one in node.args]
        if not given and method and isinstance(func, ast.Attribute):
            given = [self.of(func.value)]
        if not given or any(one is UNKNOWN for one in given):
            return UNKNOWN
        one = given[0]
        if name in {"item", "detach", "cpu", "float", "clone", "mean", "max", "min", "sum"} and method:
            return one if not isinstance(one, (list, tuple)) else UNKNOWN
        if name in {"isfinite", "isnan", "isinf"}:
            return _over(one, getattr(math, name))
        if name in {"all", "any"}:
            flat = _flat(one)
            return all(flat) if name == "all" else any(flat)
        if method:
            return UNKNOWN
        plain: dict[str, Callable[..., Any]] = {
            "bool": bool, "int": int, "float": float, "len": len, "abs": abs, "min": min, "max": max, "str": str,
        }  # fmt: skip
        return plain[name](*given) if name in plain else UNKNOWN

    def _size(self, name: str, node: ast.Call) -> Any:
        """len(x), x.numel(), x.size(0), of the text of x."""
        func = node.func
        if name == "len" and len(node.args) == 1:
            text = self.values.get(ast.unparse(node.args[0]), "")
            if match := _SIZED.match(text):
                return int(match.group(1))
            return self._shape(node.args[0], ast.Constant(0))
        if not isinstance(func, ast.Attribute):
            return UNKNOWN
        if name == "numel" and (match := _SHAPED.match(self.values.get(ast.unparse(func.value), ""))):
            return math.prod(int(one) for one in match.group(1).split(",") if one.strip())
        return self._shape(func.value, node.args[0]) if name == "size" and node.args else UNKNOWN

    def _shape(self, tensor: ast.expr, at: ast.expr) -> Any:
        match = _SHAPED.match(self.values.get(ast.unparse(tensor), ""))
        index = self.of(at)
        if match is None or not isinstance(index, int):
            return UNKNOWN
        return [int(one) for one in match.group(1).split(",") if one.strip()][index]


def _over(value: Any, function: Callable[[Any], bool]) -> Any:
    return [_over(one, function) for one in value] if isinstance(value, (list, tuple)) else function(value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [part for one in value for part in _flat(one)]
    return [value]


def names(expression: ast.AST) -> list[str]:
    """All names and attributes in an expression."""
    found = []
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
    return found


def asks_for_rank(expression: ast.AST) -> bool:
    """Whether a condition is about which rank this is."""
    return any(_RANKISH.search(name) for name in names(expression))


def is_rank_local(expression: ast.AST) -> bool:
    """Whether a condition, by its names, depends on something that each rank has for itself."""
    return any(_LOCAL.search(name) for name in names(expression))


def singled_out(expression: ast.AST, results: Mapping[int, bool | None]) -> list[int]:
    """The ranks that a condition on the rank picks out: its rarer side's, or in a world of two the named one."""
    known = {rank: one for rank, one in results.items() if one is not None}
    sides = [[rank for rank, one in known.items() if one is side] for side in (True, False)]
    if not sides[0] or not sides[1]:
        return []
    if len(sides[0]) != len(sides[1]):
        return min(sides, key=len)
    for node in ast.walk(expression):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            parts = [node.left, node.comparators[0]]
            constants = [one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, int)]
            if constants and constants[0] in known and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                return [constants[0]]
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return sides[1]
    return sides[0]
