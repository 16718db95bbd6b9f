"""Samples, a model and kinds of outputs for the tests of evaluation and prediction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 5


def samples(size: int) -> TensorDataset:
    """Features, classes, numbers: nothing that is the same in two samples."""
    made = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(size, 3, generator=made), torch.randint(CLASSES, (size,), generator=made), torch.arange(size)
    )


def model() -> nn.Linear:
    made = nn.Linear(3, CLASSES)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in made.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return made.double()


_model = model()


@torch.no_grad()
def scores(batch: Any) -> torch.Tensor:
    found: torch.Tensor = _model(batch[0].double())
    return found


def scores_and_classes(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return scores(batch), batch[1]


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


@dataclasses.dataclass
class Outputs:
    scores: torch.Tensor
    loss: torch.Tensor | None = None


KINDS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda batch: batch[2] * 10,
    "scalar": lambda batch: batch[0][:, 0],
    "tuple": lambda batch: (batch[2], (batch[0], batch[2] > 2)),
    "named": lambda batch: Pair(batch[2], batch[2] + 1),
    "dict": lambda batch: {"number": batch[2], "inside": {"half": batch[0].half(), "none": None}},
    "dataclass": lambda batch: Outputs(batch[0].bfloat16()),
    "texts": lambda batch: [f"sample {number}" for number in batch[2].tolist()],
    "boxes": lambda batch: [torch.full((int(number) % 3, 4), float(number)) for number in batch[2]],
    "several": lambda batch: [batch[0], batch[2]],
    "complex": lambda batch: torch.complex(batch[0], batch[0]),
    "numpy": lambda batch: batch[0].numpy(),
    "empty": lambda batch: batch[0][:, :0],
}


def plainly(value: Any) -> Any:
    """Something that compares."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, plainly(vars(value))
    if isinstance(value, dict):
        return {key: plainly(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plainly(one) for one in value]
    return value
