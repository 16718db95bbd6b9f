"""One small training, for every strategy and for one process on the concatenated batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from instep.comm.session import current
from instep.train import modules
from instep.train.precision import Precision
from instep.train.strategies import FSDP, HSDP, Strategy, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instep.comm import Session

# torch 2.6 shards on GPUs only.
SHARDS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_sharding = pytest.mark.skipif(not SHARDS_ON_CPU, reason=f"fully_shard of torch {torch.__version__} needs a GPU")

STEPS = 5
ROWS = 4  # samples of a micro-batch
CLIP = 0.5


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


def network() -> nn.Sequential:
    """The same on every rank; its sizes divide evenly by no number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7)), nn.Tanh(), nn.Linear(7, 3)
    )


def blocks(name: str) -> str | Strategy:
    """The strategy of that name; FSDP with blocks, which the small network would not have by default."""
    kinds = {"fsdp": FSDP, "hsdp": HSDP}
    return kinds[name](blocks=[nn.Linear, nn.Sequential]) if name in kinds else name


def possible(*names: str) -> list[str]:
    """Those of the strategies that this torch can do on the CPU."""
    return [name for name in names if SHARDS_ON_CPU or name not in ("fsdp", "hsdp")]


def windows(accumulate: int, world_size: int, steps: int = STEPS) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each step its micro-batches, for each micro-batch what each rank takes.

    The last window is partial: its last micro-batch has fewer samples, another number on each rank.
    """
    maker = torch.Generator().manual_seed(1)
    for step in range(steps):
        window = []
        for micro in range(accumulate):
            short = step == steps - 1 and micro == accumulate - 1
            rows = [ROWS - (rank % 3 if short else 0) for rank in range(world_size)]
            window.append(
                [(torch.randn(n, 6, generator=maker), torch.randint(0, 3, (n,), generator=maker)) for n in rows]
            )
        yield window


class Training:
    """The step in short: what the real one does with a strategy and a precision."""

    def __init__(
        self,
        strategy: str | Strategy,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        *,
        precision: str = "fp32",
        instance: bool = True,
        fused: bool = True,
        model: nn.Module | None = None,
        transform: dict[str, Any] | None = None,
    ) -> None:
        self.session: Session = current("the test")
        self.strategy = resolve(strategy, self.session.world_size)
        self.precision = Precision(precision, self.session.device)  # type: ignore[arg-type]  # a name to be refused
        self.model = model or network()
        if transform:
            self.model = modules.transform(self.model, self.strategy, self.session, **transform)
        optimizer = make(self.model.parameters()) if instance else make
        self.wrapped, self.optimizer = self.strategy.prepare(
            self.model, optimizer, self.session, self.precision, fused=fused
        )
        self.parameters = [one for one in self.wrapped.parameters() if one.requires_grad]
        self.norms: list[float] = []
        self.skipped: list[int] = []

    def window(self, window: list[list[tuple[Tensor, Tensor]]], poison: float = 1.0) -> None:
        samples = sum(len(y) for ranks in window for _, y in ranks)
        divisor = self.strategy.gradient_divisor(self.session)
        for number, ranks in enumerate(window):
            last = number == len(window) - 1
            x, y = ranks[self.session.rank]
            with nullcontext() if last else self.strategy.no_sync(self.wrapped):
                with self.precision.autocast():
                    loss = nn.functional.cross_entropy(self.wrapped(x), y, reduction="sum")
                self.precision.scale(loss * poison * (divisor / samples)).backward()
        found = self.precision.unscale_and_check(self.parameters, self.optimizer, self.strategy)
        self.norms.append(self.strategy.clip(self.parameters, CLIP).item())
        self.precision.step(self.optimizer, found)
        self.precision.update()
        self.skipped.append(int(found.item()))
        self.optimizer.zero_grad()

    def run(self, accumulate: int = 1, steps: int = STEPS) -> Training:
        for window in windows(accumulate, self.session.world_size, steps):
            self.window(window)
        return self

    def weights(self) -> dict[str, Tensor]:
        """On the main rank."""
        return self.strategy.full_model_state(self.wrapped)


def alone(
    make: Callable[[Any], torch.optim.Optimizer],
    accumulate: int,
    world_size: int,
    steps: int = STEPS,
    model: nn.Module | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """One process, plain torch, on the concatenated batches: (weights, norms)."""
    model = model or network()
    optimizer = make(model.parameters())
    norms = []
    for window in windows(accumulate, world_size, steps):
        x = torch.cat([x for ranks in window for x, _ in ranks])
        y = torch.cat([y for ranks in window for _, y in ranks])
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
