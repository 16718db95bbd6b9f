"""A small training for the tests of callbacks: 64 samples, linear truth, a tiny network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from instep.train import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instep.train.events import Callback


def data(size: int = 64) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).detach().abs().mean()


def trainer(
    callbacks: Iterable[Callback] = (),
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Trainer:
    """16 samples a step over all ranks, 4 steps an epoch."""
    model = model or net()
    given: dict[str, Any] = {"global_batch": 16, "epochs": 3, "progress": False, "summary": False}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    return Trainer(model, optimizer, data(), loss=mse_loss, callbacks=list(callbacks), **{**given, **options})
