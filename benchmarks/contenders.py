"""The same training by hand, with instep, and with its peers: what overhead.py starts, a rank each.

    instep run --nproc 2 benchmarks/contenders.py NAME PATH EPOCHS RESULT

An MLP 32-64-10, 64 samples per rank and step, AdamW with torch's defaults, epochs of 200 steps, the loss shown every
50 steps. All have the same loss function, and it is the clock: from the loss of an epoch's first step to that of the
next one's, all that lies between counts: batches, logging, the end of the epoch. The first epoch and the last do not.

PATH "samples": a TensorDataset as everybody has it. "batches": they lie ready, to show the loop itself.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 64
EPOCH = 200  # steps
SHOW = 50
LR = 1e-3
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Clock:
    """Cross entropy, and the time at which each epoch first asked for it.

    Args:
        epochs: those that count; there is one more before them, and one after.

    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs + 2
        self.calls = 0
        self.seen: list[float] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.calls % EPOCH == 0:
            self.seen.append(time.perf_counter())
        self.calls += 1
        return cross_entropy(outputs, targets)

    def microseconds(self) -> list[float]:
        """Per step, by epoch."""
        assert self.calls == self.epochs * EPOCH, f"{self.calls} steps, not {self.epochs * EPOCH}"
        begins = self.seen[1:]
        return [1e6 * (end - begin) / EPOCH for begin, end in itertools.pairwise(begins)]


class Ready(Dataset[Any]):
    """A dataset whose batches lie ready: whoever asks for the samples of one gets it at once."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return BATCH * len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batches[index // BATCH]
        return x[index % BATCH], y[index % BATCH]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.batches[indices[0] // BATCH]


def as_it_is(batch: Any) -> Any:
    """A collate_fn for batches that are batches already."""
    return batch


def dataset(path: str) -> tuple[Dataset[Any], dict[str, Any]]:
    """An epoch of data for all ranks; what else DataLoader needs to know about it."""
    torch.manual_seed(0)
    size = BATCH * EPOCH * WORLD_SIZE
    x, y = torch.randn(size, 32), torch.randint(10, (size,))
    if path == "samples":
        return TensorDataset(x, y), {}
    return Ready(list(zip(x.split(BATCH), y.split(BATCH), strict=True))), {"collate_fn": as_it_is}


def mlp() -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def hand(path: str, clock: Clock, **optimizer_options: Any) -> None:
    """As a good tutorial writes it; nothing around the model where there is only one rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    data, options = dataset(path)
    model = mlp()
    sampler: DistributedSampler[Any] | None = None
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=bool(optimizer_options))
        sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, shuffle=sampler is None, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **optimizer_options)
    device, step = torch.device("cpu"), 0
    model.train()
    for epoch in range(clock.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)  # noqa: PLW2901  # as tutorials have it
            optimizer.zero_grad(set_to_none=True)
            loss = clock(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % SHOW == 0 and RANK == 0:
                print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}", flush=True)
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()


def tuned(path: str, clock: Clock) -> None:
    """By hand, by somebody who knows: the fused optimizer, gradients that live in the buckets."""
    hand(path, clock, fused=True)


def instep_trainer(path: str, clock: Clock) -> None:
    """All that is on by default, in a run folder, and a checkpoint at the end."""
    import instep

    data, options = dataset(path)
    with instep.init():
        instep.Trainer(
            mlp,
            lambda parameters: torch.optim.AdamW(parameters, lr=LR),
            data,
            loss=clock,
            batch_size_per_rank=BATCH,
            loader_options=options,
            epochs=clock.epochs,
            checkpoint=instep.train.Checkpoints(every_steps=1_000_000, every_epochs=None),
        ).fit()


def accelerate(path: str, clock: Clock) -> None:
    """The loop of its documentation."""
    library: Any = importlib.import_module("accelerate")

    data, options = dataset(path)
    accelerator = library.Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, **options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    step = 0
    for epoch in range(clock.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = clock(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % SHOW == 0:
                accelerator.print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


def lightning(path: str, clock: Clock) -> None:
    """Its defaults, progress bar and logger among them; no checkpoints, which it would write each epoch."""
    library: Any = importlib.import_module("lightning")

    class Model(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any) -> Tensor:
            loss = clock(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    data, options = dataset(path)
    trainer = library.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_epochs=clock.epochs,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=BATCH, shuffle=True, **options))


def ignite(path: str, clock: Clock) -> None:
    """An Engine over what idist makes."""
    idist: Any = importlib.import_module("ignite.distributed")
    engines: Any = importlib.import_module("ignite.engine")

    data, options = dataset(path)
    if WORLD_SIZE > 1:
        idist.initialize("gloo")
    model = idist.auto_model(mlp())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=LR))
    loader = idist.auto_dataloader(data, batch_size=BATCH * WORLD_SIZE, shuffle=True, **options)
    device = idist.device()

    def update(_: Any, batch: Any) -> Tensor:
        model.train()
        x, y = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = clock(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = engines.Engine(update)

    @trainer.on(engines.Events.ITERATION_COMPLETED(every=SHOW))  # type: ignore[untyped-decorator]
    def show(engine: Any) -> None:
        if RANK == 0:
            print(f"epoch {engine.state.epoch}  step {engine.state.iteration}  loss {engine.state.output.item():.4f}")

    trainer.run(loader, max_epochs=clock.epochs)
    idist.finalize()


CONTENDERS: dict[str, Callable[[str, Clock], None]] = {
    "hand-written": hand,
    "instep": instep_trainer,
    "hand-tuned": tuned,
    "ignite": ignite,
    "accelerate": accelerate,
    "lightning": lightning,
}


def main() -> None:
    """Train, and write down what a step took."""
    name, path, epochs, result = sys.argv[1:]
    clock = Clock(int(epochs))
    CONTENDERS[name](path, clock)
    if RANK == 0:
        Path(result).write_text(json.dumps(clock.microseconds()))


if __name__ == "__main__":
    main()
