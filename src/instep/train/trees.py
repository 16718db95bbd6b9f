"""Outputs of many batches put together: tensors anywhere in tuples, dicts and dataclasses, and lists of samples.

A batch of outputs is read as *columns*: each has one row per sample. Which columns there are is a :class:`Spec`; the
specs of all batches of all ranks are unified before the columns are made, since one batch alone may not show whether
a list is several outputs or one item per sample, or whether tensors have the same shape in every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.errors import TrainError
from instep.train.batches import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Column = Tensor | list[Any]


@dataclass(frozen=True)
class Rows:
    """A tensor with one row per sample.

    Attributes:
        dtype: of the tensor.
        shape: of one row.

    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[rows{''.join(f', {size}' for size in self.shape)}]"


@dataclass(frozen=True)
class Items:
    """A list with one item per sample: texts, or tensors of different shapes."""

    def __str__(self) -> str:
        return "a list of one item per sample"


@dataclass(frozen=True)
class Nothing:
    """None, in every batch."""

    def __str__(self) -> str:
        return "None"


@dataclass(frozen=True)
class Branch:
    """A tuple, dict, dataclass, or list of tensors that are several outputs.

    Attributes:
        kind: its type.
        keys: names or numbers of its parts.
        parts: what the parts are.
        unsure: a list that may as well be one item per sample, as far as was seen.

    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Spec, ...]
    unsure: bool = False

    def __str__(self) -> str:
        inside = ", ".join(f"{key}: {part}" for key, part in zip(self.keys, self.parts, strict=True))
        return f"{self.kind.__name__}({inside})"


Spec = Rows | Items | Nothing | Branch


def size_of(batch: Any, expected: int | None = None) -> int | None:
    """Number of samples in a batch: the length of its first tensor, or of its list; None where nothing tells.

    Args:
        batch: what the collate function made.
        expected: the number that it should have: it decides where there are several readings.

    """
    if isinstance(batch, list) and len(batch) == expected:
        return expected
    lengths = [len(leaf) for leaf in leaves(batch) if _is_array(leaf) and leaf.ndim]
    if expected in lengths:
        return expected
    if lengths:
        return lengths[0]
    lists = list(_lists(batch))
    return len(lists[0]) if lists else expected


def rows_of(tree: Any, expected: int | None) -> int | None:
    """Number of rows in a batch of outputs: the length of the first tensor that is not in a list, or of a list."""
    lists: list[list[Any]] = []
    for leaf in _outer(tree):
        if isinstance(leaf, list):
            lists.append(leaf)
        elif _is_array(leaf) and leaf.ndim:
            return len(leaf)
    for one in lists:
        if len(one) != expected and (length := _common_length(one)) is not None:
            return length
        return len(one)
    return expected


def describe(tree: Any, rows: int, what: str) -> Spec:
    """What columns there are in a batch of outputs.

    Args:
        tree: the outputs.
        rows: how many samples it has; a number without rows (a loss) is repeated for each of them.
        what: for errors: "outputs".

    Raises:
        TrainError: something in it has another number of rows.

    """
    if tree is None:
        return Nothing()
    if isinstance(tree, list):
        return _describe_list(tree, rows, what)
    if _is_array(tree):
        if tree.ndim and len(tree) != rows:
            raise _odd(what, rows, f"{type(tree).__name__} of shape {list(tree.shape)}")
        array = torch.as_tensor(tree)
        return Rows(array.dtype, tuple(array.shape[1:]))
    if isinstance(tree, (bool, int, float, complex)):
        return Rows(torch.as_tensor(tree).dtype, ())
    named = _parts(tree)
    if named is None:
        return Items()
    parts = tuple(describe(part, rows, f"{what}[{key!r}]") for key, part in named.items())
    return Branch(type(tree), tuple(named), parts)


def _describe_list(tree: list[Any], rows: int, what: str) -> Spec:
    # default_collate makes a list of a sample's tuple: several outputs, each with all rows. Everywhere else a list
    # has one item per sample. With as many outputs as samples only other batches can tell.
    several = bool(tree) and _common_length(tree) == rows
    if len(tree) != rows and not several:
        raise _odd(what, rows, f"list of {len(tree)}")
    if not several:
        return Items()
    parts = tuple(describe(part, rows, f"{what}[{key}]") for key, part in enumerate(tree))
    return Branch(list, tuple(range(len(tree))), parts, unsure=len(tree) == rows)


def unify(specs: Iterable[Spec], what: str) -> Spec:
    """One spec for batches of all of these.

    Raises:
        TrainError: they are not of one kind.

    """
    one, *others = specs
    for other in others:
        if other != one:
            one = _unify(one, other, what)
    return one


def decided(spec: Spec) -> Spec:
    """The spec with a decision where it is unsure: a list has one item per sample."""
    if not isinstance(spec, Branch):
        return spec
    if spec.unsure:
        return Items()
    return dataclasses.replace(spec, parts=tuple(decided(part) for part in spec.parts))


def _unify(one: Spec, other: Spec, what: str) -> Spec:
    if one == other:
        return one
    if isinstance(one, Rows) and isinstance(other, Rows):
        same = one.shape == other.shape
        return Rows(torch.promote_types(one.dtype, other.dtype), one.shape) if same else Items()
    for this, that in ((one, other), (other, one)):
        if isinstance(this, Items) and (isinstance(that, Rows) or (isinstance(that, Branch) and that.unsure)):
            return this
    if isinstance(one, Branch) and isinstance(other, Branch) and one.kind is other.kind:
        if one.keys == other.keys:
            pairs = zip(one.keys, one.parts, other.parts, strict=True)
            parts = tuple(_unify(a, b, f"{what}[{key!r}]") for key, a, b in pairs)
            return Branch(one.kind, one.keys, parts, unsure=one.unsure and other.unsure)
        if one.unsure and other.unsure:  # lists of as many tensors as there are samples, here 3 and there 2
            return Items()
    raise TrainError(
        f"The {what} are not of one kind in all batches.",
        evidence=[f"here: {one}", f"there: {other}"],
        cure="Give the same structure for every batch.",
    )


def columns(tree: Any, spec: Spec, rows: int) -> Iterator[Column]:
    """The columns of one batch, on the CPU."""
    if isinstance(spec, Rows):
        value = torch.as_tensor(tree).detach().to("cpu", spec.dtype)
        yield value if value.ndim else value.expand(rows)
    elif isinstance(spec, Items):
        yield _items(tree, rows)
    elif isinstance(spec, Branch):
        named = _parts(tree)
        assert named is not None
        for key, part in zip(spec.keys, spec.parts, strict=True):
            yield from columns(named[key], part, rows)


def leaf_specs(spec: Spec) -> list[Rows | Items]:
    """What each column is, in the order of :func:`columns`."""
    if isinstance(spec, Branch):
        return [leaf for part in spec.parts for leaf in leaf_specs(part)]
    return [] if isinstance(spec, Nothing) else [spec]


def join(pieces: Sequence[Column], spec: Rows | Items) -> Column:
    """The same column of several batches, one below the other."""
    if isinstance(spec, Rows):
        return (
            torch.cat([_tensor(piece) for piece in pieces]) if pieces else torch.empty(0, *spec.shape, dtype=spec.dtype)
        )
    return [item for piece in pieces for item in piece]


def build(spec: Spec, filled: Iterator[Column]) -> Any:
    """The columns in the structure that the outputs of one batch have."""
    if isinstance(spec, Nothing):
        return None
    if not isinstance(spec, Branch):
        return next(filled)
    parts = [build(part, filled) for part in spec.parts]
    if dataclasses.is_dataclass(spec.kind):
        return spec.kind(**dict(zip(spec.keys, parts, strict=True)))
    if issubclass(spec.kind, Mapping):
        return dict(zip(spec.keys, parts, strict=True))
    kind: Any = spec.kind
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def on_cpu(tree: Any) -> Any:
    """The outputs with their tensors on the CPU, cut off from the graph."""
    return map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def take(column: Column, order: Tensor | None) -> Column:
    """The rows in another order; None: as they are."""
    if order is None:
        return column
    return column[order] if isinstance(column, Tensor) else [column[place] for place in order.tolist()]


def _tensor(piece: Column) -> Tensor:
    assert isinstance(piece, Tensor)
    return piece


def _items(tree: Any, rows: int) -> list[Any]:
    if isinstance(tree, list):
        return [on_cpu(item) for item in tree]
    if _is_array(tree) and tree.ndim:
        # Copies: a view would drag the tensor of the whole batch along wherever it is pickled.
        return [row.clone() for row in torch.as_tensor(tree).detach().cpu()]
    return [on_cpu(tree)] * rows


def _is_array(value: Any) -> bool:
    """A tensor, or a numpy array of numbers."""
    return isinstance(value, Tensor) or (
        hasattr(value, "ndim") and getattr(value, "dtype", None) is not None and value.dtype.kind in "biufc"
    )


def _common_length(values: list[Any]) -> int | None:
    """The length of all tensors of a list, if all are tensors and have the same."""
    lengths = {len(one) if _is_array(one) and one.ndim else None for one in values}
    return lengths.pop() if len(lengths) == 1 else None


def _parts(tree: Any) -> dict[Any, Any] | None:
    """The parts of a structure by key; None for what is none."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {one.name: getattr(tree, one.name) for one in dataclasses.fields(tree) if one.init}
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    return dict(enumerate(tree)) if isinstance(tree, (tuple, list)) else None


def _outer(tree: Any) -> Iterator[Any]:
    """The leaves, where a list is a leaf."""
    named = None if isinstance(tree, list) else _parts(tree)
    if named is None:
        yield tree
        return
    for part in named.values():
        yield from _outer(part)


def _lists(tree: Any) -> Iterator[list[Any]]:
    return (leaf for leaf in _outer(tree) if isinstance(leaf, list))


def _odd(what: str, rows: int, found: str) -> TrainError:
    return TrainError(
        f"The {what} of a batch do not have one row for each sample.",
        evidence=[f"{rows} rows are expected, and there is a {found}"],
        cure="Let the forward function give only what is needed, every tensor with the samples as its first dimension "
        "(a tuple or dict for several outputs, a list for one item per sample).",
    )
