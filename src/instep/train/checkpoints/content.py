"""What goes into a checkpoint, taken apart: tensors here, plain values there; and put together again."""

from __future__ import annotations

import inspect
import io
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from instep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

Path = tuple[Any, ...]  # the keys and indices that lead to a value
_ATOMS = (type(None), bool, int, float, str, bytes)  # what torch.load(weights_only=True) takes without being asked
_DEEPEST = 100
_SHOWN = 10


class Parts:
    """A nested state taken apart.

    Attributes:
        tensors: each tensor by its key path, joined by dots: ``model.0.weight``.
        plain: the same nesting of dicts, lists and tuples, a small tensor in the place of each tensor. What is no
            dict, list or tuple is as it was given.
        problems: what cannot be saved, one line each.

    """

    def __init__(self, state: Any, prefix: str = "") -> None:
        import torch

        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._prefix = prefix
        self._tensor = torch.Tensor
        self._place = torch.empty(0)  # one for all, so that each further one costs a few bytes
        self.plain = self._walk(state, ())

    def _walk(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, self._tensor):
            self._note_tensor(value, path)
            return self._place
        if len(path) > _DEEPEST:
            self.problems.append(f"{dotted(path[:5])}...: nested more than {_DEEPEST} deep, or in itself")
            return None
        if kind in (dict, OrderedDict, defaultdict):
            for key in value:
                if not _is_key(key):
                    self.problems.append(f"{dotted(path) or 'the state'}: its key {_describe(key)} cannot be saved")
            return {key: self._walk(one, (*path, key)) for key, one in value.items()}
        if kind in (list, tuple):
            return kind(self._walk(one, (*path, number)) for number, one in enumerate(value))
        if not comes_back(value):
            self.problems.append(f"{dotted(path) or 'the state'}: {_describe(value)} cannot be saved")
        return value

    def _note_tensor(self, value: Tensor, path: Path) -> None:
        key = self._prefix + dotted(path)
        if value.is_meta:
            self.problems.append(f"{dotted(path)}: a tensor without data (device 'meta') cannot be saved")
        elif str(value.layout) != "torch.strided":
            self.problems.append(f"{dotted(path)}: a tensor with layout {value.layout} cannot be saved; .to_dense()")
        elif key in self.tensors:
            self.problems.append(f"{dotted(path)}: two tensors have this key path")
        self.tensors[key] = value


def dotted(path: Iterable[Any]) -> str:
    """A key path for people, and for torch.distributed.checkpoint."""
    return ".".join(map(str, path))


def put_together(plain: Any, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """The nested state again, from its plain values and its tensors."""
    return _rebuild(plain, (), lambda path: tensors[prefix + dotted(path)])


def places(plain: Any, prefix: str = "") -> list[str]:
    """The keys of the tensors that belong into the places of a nested state."""
    found: list[str] = []

    def note(path: Path) -> None:
        found.append(prefix + dotted(path))

    _rebuild(plain, (), note)
    return found


def _rebuild(plain: Any, path: Path, tensor: Any) -> Any:
    import torch

    if isinstance(plain, torch.Tensor):
        return tensor(path)
    if isinstance(plain, dict):
        return {key: _rebuild(value, (*path, key), tensor) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return type(plain)(_rebuild(value, (*path, number), tensor) for number, value in enumerate(plain))
    return plain


def fill(state: Any, plain: Any) -> Any:
    """Put the plain values of a checkpoint into a nested state, in place, and leave its tensors alone.

    A value that the checkpoint does not have stays as it is; one that only the checkpoint has is added to its dict.

    Returns:
        The state: itself, but for tuples, which are made anew.

    """
    import torch

    if isinstance(plain, torch.Tensor) or isinstance(state, torch.Tensor):
        return state
    if isinstance(state, dict) and isinstance(plain, dict):
        for key, value in plain.items():
            if key in state:
                state[key] = fill(state[key], value)
            elif not any(True for _ in _tensors(value)):
                state[key] = value
        return state
    if isinstance(state, list) and isinstance(plain, list):
        if len(state) == len(plain):
            state[:] = [fill(one, value) for one, value in zip(state, plain, strict=True)]
        else:
            state[:] = plain
        return state
    if isinstance(state, tuple) and isinstance(plain, tuple) and len(state) == len(plain):
        filled = [fill(one, value) for one, value in zip(state, plain, strict=True)]
        return type(state)(*filled) if hasattr(state, "_fields") else type(state)(filled)
    return plain


def _tensors(plain: Any) -> Iterator[Any]:
    import torch

    if isinstance(plain, torch.Tensor):
        yield plain
    elif isinstance(plain, (dict, list, tuple)):
        for value in plain.values() if isinstance(plain, dict) else plain:
            yield from _tensors(value)


def as_bytes(plain: Any) -> bytes:
    """Plain values the way torch.save writes them."""
    import torch

    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def refuse(problems: list[str], where: str = "") -> CheckpointError:
    """The error for what cannot be saved."""
    shown = problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
    return CheckpointError(
        f"The state holds what a checkpoint cannot keep{where}. Nothing was written.",
        evidence=shown,
        cure="A checkpoint takes tensors, numbers, strings, None, and dicts, lists and tuples of them. Leave the rest "
        "out of\nstate_dict() and make it anew when the state is loaded; a numpy number or array: float(x), "
        "torch.from_numpy(x).",
    )


def _is_key(key: Any) -> bool:
    return type(key) in _ATOMS or (type(key) is tuple and all(map(_is_key, key)))


def comes_back(value: Any) -> bool:
    """Whether torch.load(weights_only=True) would take what torch.save writes of it."""
    import torch

    try:
        torch.load(io.BytesIO(as_bytes(value)), weights_only=True)
    except Exception:  # noqa: BLE001  # pickle raises whatever the object's own code raises
        return False
    return True


def _describe(value: Any) -> str:
    """What a thing is, and where it comes from."""
    if inspect.isfunction(value):
        code = value.__code__
        return f"a function {value.__name__} at {code.co_filename}:{code.co_firstlineno}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a repr of the user's
        text = "..."
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__} ({text[:80]})"
