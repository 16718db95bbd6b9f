"""Small things to train, for the trainer's tests. Smooth networks, so that rounding stays rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import instep


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def data(samples: int = 61, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


class Watched(Dataset[Any]):
    """A dataset that notes which samples are asked for."""

    def __init__(self, samples: int = 64) -> None:
        self.inner = data(samples)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return *self.inner[index], torch.tensor(index)


def quiet(**options: Any) -> dict[str, Any]:
    """Options of a trainer that prints nothing."""
    return {"loss": cross_entropy, "progress": False, "summary": False, **options}


def weights(trainer: instep.Trainer) -> list[torch.Tensor]:
    return [one.detach().clone() for one in trainer.model.parameters()]


def near(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=tolerance) for one, other in zip(ours, theirs, strict=True))


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Losses(instep.train.Callback):
    """Notes the loss and the learning rate of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_report(self, trainer: instep.Trainer, report: instep.train.Report) -> None:  # noqa: ARG002
        self.losses.append(report.loss)
        self.rates.append(report.lr)
