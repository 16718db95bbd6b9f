"""Short texts of values, made without running any code of the user's: no repr, no property, no __len__ of theirs.

What is shown: numbers, booleans, None, short texts, one-element tensors on the CPU; of tensors otherwise the dtype and
the shape; of lists and their like how many; of anything else the class. A tensor on a GPU is never read, which would
wait for the GPU.
"""

from __future__ import annotations

import enum
import pathlib
import sys
import types
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType, FrameType

_MOST_VALUES = 60
_LONGEST = 80
_ARGUMENTS = (
    "src", "dst", "group_src", "group_dst", "group", "tag", "wait_all_ranks", "group_rank", "group_size"
)  # fmt: skip


def _ids(*kinds: type) -> frozenset[int]:
    """Classes by identity: to look for a class in a set would ask its metaclass, which may be the user's."""
    return frozenset(map(id, kinds))


_NUMBERS = _ids(type(None), bool, float, complex)
_SHORT = _NUMBERS | _ids(int, str)
_PLAIN = _SHORT | _ids(list, tuple)
_PATHS = _ids(pathlib.PosixPath, pathlib.WindowsPath)
_SEQUENCES = {id(kind): kind.__name__ for kind in (list, tuple, set, frozenset, deque)}
_UNINTERESTING = _ids(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_SHOWS_ITS_LOCALS = frozenset({"locals", "vars", "eval", "exec"})
_FAST = 0x1  # CO_OPTIMIZED: a function, whose variables are not in a dict

_name_of = type.__dict__["__name__"].__get__
_qualname_of = type.__dict__["__qualname__"].__get__
_module_of = type.__dict__["__module__"].__get__
_bases_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__


def class_name(kind: type) -> str:
    """A class's full name as tracebacks have it."""
    name, module = str(_qualname_of(kind)), _module(kind)
    return name if module in {"", "builtins", "__main__"} else f"{module}.{name}"


def _module(kind: type) -> str:
    try:
        found = _module_of(kind)
    except AttributeError:
        return ""
    return found if type(found) is str else ""


def text_of(value: object, depth: int = 0) -> str:
    """A value in at most 80 characters."""
    text = _text(value, depth)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _text(value: Any, depth: int) -> str:  # noqa: PLR0911  # one for each kind of value
    kind = type(value)
    which = id(kind)
    if which in _NUMBERS:
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() < 200 else "int of many digits"
    if kind is str:
        return repr(value[:_LONGEST])
    if which in _PATHS:
        return repr(str(value)[:_LONGEST])
    if which in _SEQUENCES:
        return _of_sequence(value, depth)
    if kind is dict:
        return _of_dict(value)
    return _of_torch(value, kind) or _of_other(value, kind)


def _of_sequence(value: Any, depth: int) -> str:
    """Short ones whole, long ones by their number."""
    size, kind = len(value), type(value)
    try:
        parts = list(value) if size <= 4 and depth < 2 else None
    except RuntimeError:  # changed meanwhile
        parts = None
    if parts is not None and all(id(type(one)) in _PLAIN for one in parts):
        ends = "[]" if kind is list else "()" if kind is tuple else "{}"
        inner = ", ".join(text_of(one, depth + 1) for one in parts)
        comma = "," if kind is tuple and size == 1 else ""
        return f"{ends[0]}{inner}{comma}{ends[1]}"
    return f"{_SEQUENCES[id(kind)]} of {size}"


def _of_dict(value: dict[Any, Any]) -> str:
    """How many, and the first keys, in their order."""
    try:
        keys = list(value)[:6] if len(value) < 1000 else []
    except RuntimeError:
        keys = []
    names = ", ".join(repr(one) for one in keys if id(type(one)) in _SHORT)
    return f"dict of {len(value)}" + (f": {names}" if names else "")


def _of_torch(value: Any, kind: type) -> str:
    """A tensor, a device, a dtype; "" for anything else, subclasses of tensors too: they may be anybody's code."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if torch is None or tensor is None:
        return ""
    try:
        if kind is tensor or kind is torch.nn.Parameter:
            return _of_tensor(value, torch)
        if kind is torch.Size:
            return str(list(value))
        if kind is torch.device or kind is torch.dtype:
            return str(value)
    except Exception:  # noqa: BLE001  # torch may be half imported, the tensor without storage: no text then
        return ""
    return ""


def _of_tensor(value: Any, torch: Any) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    on_cpu = value.device.type == "cpu"
    if on_cpu and value.layout is torch.strided and value.numel() == 1:
        shape = f"{list(value.shape)}" if value.dim() else ""
        return f"{value.detach().item()!r} ({dtype}{shape})"
    place = "" if on_cpu else f" on {value.device}"
    return f"{dtype} {list(value.shape)}{place}"


def _of_other(value: Any, kind: type) -> str:
    name = str(_name_of(kind))
    if type(kind) is enum.EnumMeta:
        member = _attributes(value).get("_name_")
        if type(member) is str:
            return f"{name}.{member}"
    numpy = sys.modules.get("numpy")
    with suppress(Exception):  # numpy may be half imported
        if numpy is not None and kind is numpy.ndarray:
            return f"array {value.dtype} {list(value.shape)}"
        if numpy is not None and _module(kind) == "numpy" and id(numpy.generic) in map(id, _bases_of(kind)):
            return repr(value.item())
    return name


def size_of(value: object) -> str:
    """How many samples an object seems to hold, told by the lists and tensors among its own attributes; "" if none."""
    return ", ".join(f"{name}: {size}" for name, size in sizes_of(value).items())


def sizes_of(value: object) -> dict[str, int]:
    """The sizes of the lists and tensors among an object's own attributes, by name; of a list, its own."""
    if type(value) is list or type(value) is range:
        return {"length": len(value)}
    found = {}
    for name, one in list(_attributes(value).items())[:20]:
        if type(one) is list or type(one) is dict or type(one) is range:
            found[name] = len(one)
        elif type(one) is tuple and one and _of_torch(one[0], type(one[0])):
            found[name] = one[0].shape[0] if one[0].dim() else 0
        elif (text := _of_torch(one, type(one))) and "[" in text:
            found[name] = one.shape[0]
    return found


def _attributes(value: object) -> dict[str, Any]:
    """An object's own attributes, without asking it."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001  # it has none
        return {}
    return found if type(found) is dict else {}


def message(error: BaseException) -> str:
    """An exception's message, which a class of the user's may make in any way: then its arguments."""
    arguments = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    plain = all(id(type(one)) in _SHORT for one in arguments)
    own = any("__str__" in _dict_of(base) and _module(base) != "builtins" for base in _bases_of(type(error)))
    text = str(error) if plain and not own else ", ".join(map(text_of, arguments))
    return text[:500]


def arguments(frame: FrameType) -> dict[str, str]:
    """The arguments that tell what a collective of torch's waits for: root or peer, and the group by its name."""
    known = {name: one for name, one in _locals(frame).items() if name in _ARGUMENTS and one is not None}
    told = {name: text_of(one) for name, one in known.items() if name != "group"}
    if "group" in frame.f_code.co_varnames:
        told["group"] = _group_name(known.get("group"))
    return told


def _group_name(group: object) -> str:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = c10d._world  # type: ignore[union-attr]  # noqa: SLF001  # reading only
        return str(world.pg_names[world.default_pg if group is None else group])
    except Exception:  # noqa: BLE001  # no such group (any more)
        return ""


def variables(frame: FrameType) -> dict[str, str]:
    """The variables of a function of the user's, plain ones first, then what it uses of objects and of its module.

    ``self.count``, ``config.train.lr`` and ``batch['x']`` are there under these names where the function uses such
    attributes or keys.
    """
    code = frame.f_code
    own = _locals(frame)
    used = set(code.co_names)
    if not code.co_flags & _FAST:  # a module: its functions and what it does not use itself are left out
        own = {name: one for name, one in own.items() if name in used}
    keys = {one for one in code.co_consts if type(one) is str and len(one) < 40}
    values: dict[str, object] = {name: one for name, one in own.items() if not name.startswith("__")}
    _add_parts(values, used, keys)
    module = frame.f_globals
    for name in used - values.keys():
        if name in module and _is_short(module[name]):
            values[name] = module[name]
    interesting = {
        name: one for name, one in values.items() if _UNINTERESTING.isdisjoint(map(id, _bases_of(type(one))))
    }
    names = sorted(interesting, key=lambda name: not _is_short(interesting[name]))
    return {name: text_of(interesting[name]) for name in names[:_MOST_VALUES]}


def objects(frame: FrameType) -> dict[str, object]:
    """A function's variables, and the attributes of its ``self``, themselves."""
    found: dict[str, object] = _locals(frame)
    return found | {f"self.{name}": one for name, one in _attributes(found.get("self")).items()}


def _add_parts(values: dict[str, object], used: set[str], keys: set[str]) -> None:
    """Attributes and keys that the function uses, of its objects and of theirs."""
    level = dict(values)
    for _ in range(2):
        parts: dict[str, object] = {}
        for name, value in level.items():
            if type(value) is dict:
                parts |= {f"{name}[{key!r}]": value[key] for key in keys if key in value}
            elif not _is_short(value) and _is_interesting(value):
                mine = _attributes(value)
                parts |= {f"{name}.{one}": mine[one] for one in used if one in mine}
            if len(parts) > 200:
                break
        values |= parts
        level = parts


def _is_interesting(value: object) -> bool:
    return _UNINTERESTING.isdisjoint(map(id, _bases_of(type(value))))


def _is_short(value: object) -> bool:
    return id(type(value)) in _SHORT or type(type(value)) is enum.EnumMeta


def _locals(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables.

    Before Python 3.13 a function's are copied into a dict that stays with its frame: it is emptied again, or it would
    keep tensors in memory. Not where the function itself may hold that dict, or a debugger works with it: such a
    function's are not looked at.
    """
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & _FAST:
        return dict(frame.f_locals)
    if _is_looked_at(code, frame):
        return {}
    found = frame.f_locals
    copied = dict(found)
    found.clear()
    return copied


def _is_looked_at(code: CodeType, frame: FrameType) -> bool:
    return frame.f_trace is not None or not _SHOWS_ITS_LOCALS.isdisjoint(code.co_names)
