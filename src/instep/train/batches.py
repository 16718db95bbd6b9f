"""How a batch is taken apart: tensors anywhere in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with `function` applied to each tensor and other leaf; containers keep their types."""
    if isinstance(batch, Tensor):
        return function(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Fields that are not arguments of the constructor are its own affair.
        mapped = {
            one.name: map_leaves(function, getattr(batch, one.name)) for one in dataclasses.fields(batch) if one.init
        }
        return dataclasses.replace(batch, **mapped)
    if isinstance(batch, Mapping):
        items = {key: map_leaves(function, value) for key, value in batch.items()}
        return items if isinstance(batch, dict) and type(batch) is dict else _like(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_leaves(function, value) for value in batch)
    return function(batch)


def _like(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(batch)(items)  # type: ignore[call-arg]  # what dict-like classes take (HF's BatchEncoding too)
    except TypeError:
        return items


def leaves(batch: Any) -> Iterator[Any]:
    """The tensors and other leaves of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for one in dataclasses.fields(batch):
            yield from leaves(getattr(batch, one.name))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; from pinned memory the copy does not hold up the caller."""
    if device.type == "cpu":
        return batch
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def count(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor.

    Raises:
        TrainError: there is no tensor with a first dimension in it.

    """
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(first, Tensor) and first.dim():  # nearly always
        return len(first)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise TrainError(
        "How many samples are in this batch? There is no tensor in it with a first dimension.",
        evidence=[f"{type(batch).__name__}: {batch!r:.100}"],
        cure="Let the collate_fn stack the samples, or say it:  Trainer(..., weight=lambda batch: number)",
    )


def pieces(batch: Any, most: int) -> list[Any]:
    """The batch cut along the first dimension into pieces of at most `most` samples.

    Raises:
        TrainError: something in it cannot be cut: its length is not the number of samples.

    """
    size = count(batch)
    if size <= most:
        return [batch]
    return [map_leaves(lambda leaf: _cut(leaf, start, start + most, size), batch) for start in range(0, size, most)]  # noqa: B023


def _cut(leaf: Any, start: int, end: int, size: int) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.dim() == 0:
            return leaf
        if len(leaf) == size:
            return leaf[start:end]
    elif not isinstance(leaf, Sequence):
        return leaf
    raise TrainError(
        "This batch cannot be cut into smaller ones.",
        evidence=[f"{size} samples, and a {type(leaf).__name__} of length {len(leaf)} in it"],
        cure="Take a smaller batch_size_per_rank and more accumulate, which keep the global batch.",
    )


class Call:
    """How the model is called with a batch.

    ======================  =================================  ==========================
    batch                   the model gets                     targets
    ======================  =================================  ==========================
    ``(x, y)``              ``model(x)``                       ``y``
    ``(x1, x2, y)``         ``model(x1, x2)``                  ``y``
    dict or dataclass       the fields that forward() names    field `target`, or the batch
    one tensor              ``model(x)``                       None
    ======================  =================================  ==========================

    Args:
        model: the bare module: its forward() says which fields it takes.
        target: the field of dicts and dataclasses that holds the targets.

    """

    def __init__(self, model: nn.Module, target: str | None = None) -> None:
        self.target = target
        parameters = inspect.signature(model.forward).parameters.values()
        self._all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._model = type(model).__name__

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """(outputs, targets)."""
        if isinstance(batch, (tuple, list)):
            if len(batch) == 2:
                return model(batch[0]), batch[1]
            return (model(*batch[:-1]), batch[-1]) if len(batch) > 1 else (model(*batch), None)
        if isinstance(batch, Tensor):
            return model(batch), None
        fields = self._fields(batch)
        outputs = model(**{name: value for name, value in fields.items() if self._all or name in self._names})
        return outputs, batch if self.target is None else self._targets(fields)

    def _fields(self, batch: Any) -> Mapping[str, Any]:
        fields: Mapping[str, Any] | None = None
        if isinstance(batch, Mapping):
            fields = batch
        elif dataclasses.is_dataclass(batch):
            fields = {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch)}
        if fields is None or not (self._all or any(name in fields for name in self._names)):
            raise TrainError(
                f"How is {self._model} called with a batch of this kind?",
                evidence=[
                    f"batch: {type(batch).__name__}" + (f" with {sorted(map(str, fields))}" if fields else ""),
                    f"{self._model}.forward takes {self._names}",
                ],
                cure="Say it:  Trainer(..., training_step=lambda model, batch: loss)  and, to evaluate,\n"
                "prediction_step=lambda model, batch: (outputs, targets)",
            )
        return fields

    def _targets(self, fields: Mapping[str, Any]) -> Any:
        assert self.target is not None
        if self.target not in fields:
            raise TrainError(
                f"The batch has no field {self.target!r} for the targets.",
                evidence=[f"target={self.target!r}", f"fields: {sorted(map(str, fields))}"],
                cure="Trainer(..., target='one of these')",
            )
        return fields[self.target]
