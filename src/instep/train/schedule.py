"""The learning rate over the steps: named shapes, any scheduler of torch, warm-up, and scaling with the global batch.

A schedule moves on once per optimizer step, whatever the number of ranks and the accumulation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from instep.errors import TrainError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Shape = Literal["constant", "linear", "cosine"]


def factor(shape: str, step: int, steps: int | None, warmup: int) -> float:
    """What the learning rate is multiplied with at `step` (from 0).

    Args:
        shape: ``constant``; ``linear`` to 0; ``cosine`` to 0 (SGDR without restarts, arXiv:1608.03983).
        step: optimizer steps done.
        steps: of the whole training; None is enough for ``constant``.
        warmup: steps over which it rises from 1 / warmup to 1 (arXiv:1706.02677).

    """
    if step < warmup:
        return (step + 1) / warmup
    if shape == "constant":
        return 1.0
    assert steps is not None
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def build(schedule: Any, optimizer: Optimizer, steps: int | None, warmup: int) -> LRScheduler | None:
    """The scheduler that ``step()`` is called on after each update; None for a constant learning rate.

    Args:
        schedule: the name of a shape; a function of the optimizer, or of optimizer and steps; a scheduler of torch
            made over this very optimizer; None.
        optimizer: the one that training uses.
        steps: of the whole training, None where nobody knows.
        warmup: steps of warm-up before it.

    Raises:
        TrainError: there is no such shape, its length is not known, or it was made over another optimizer.

    """
    if schedule is None and not warmup:
        return None
    if schedule is None or isinstance(schedule, str):
        return _shaped(schedule or "constant", optimizer, steps, warmup)
    made = schedule if isinstance(schedule, (LRScheduler, ReduceLROnPlateau)) else _call(schedule, optimizer, steps)
    _check(made, optimizer)
    if not warmup:
        return cast("LRScheduler", made)
    if isinstance(made, ReduceLROnPlateau):
        raise TrainError(
            "ReduceLROnPlateau follows a metric, so it cannot come after a warm-up of so many steps.",
            evidence=[f"warmup={warmup}"],
            cure="Leave warmup out, or take schedule='cosine'.",
        )
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(1, warmup - 1))
    return SequentialLR(optimizer, [rise, made], milestones=[warmup])


def _shaped(shape: str, optimizer: Optimizer, steps: int | None, warmup: int) -> LRScheduler:
    if shape not in get_args(Shape):
        raise TrainError(
            f"There is no schedule {shape!r}.",
            cure=f"One of {', '.join(map(repr, get_args(Shape)))}, or a function that makes one of torch's:\n"
            "schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)",
        )
    if steps is None and shape != "constant":
        raise TrainError(
            f"How long is a {shape} schedule over data of unknown length?",
            evidence=["steps=None, and the training data have no length"],
            cure="Trainer(..., steps=10_000)",
        )
    return LambdaLR(optimizer, lambda step: factor(shape, step, steps, warmup))


def _call(schedule: Any, optimizer: Optimizer, steps: int | None) -> Any:
    import inspect

    try:
        wanted = len(inspect.signature(schedule).parameters)
    except (TypeError, ValueError):
        wanted = 0
    if wanted not in (1, 2):
        raise TrainError(
            "This is no schedule.",
            evidence=[f"schedule={schedule!r:.100}"],
            cure="A name ('cosine'), or a function of the optimizer and of the number of steps:\n"
            "schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)",
        )
    if wanted == 2 and steps is None:
        raise TrainError(
            "The schedule wants the number of steps, and the training data have no length.",
            cure="Trainer(..., steps=10_000)",
        )
    return schedule(optimizer) if wanted == 1 else schedule(optimizer, steps)


def _check(made: Any, optimizer: Optimizer) -> None:
    if not isinstance(made, (LRScheduler, ReduceLROnPlateau)):
        raise TrainError(
            f"The schedule gave a {type(made).__name__}, which is no scheduler of torch.",
            cure="schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        )
    if made.optimizer is not optimizer:
        raise TrainError(
            "The scheduler was made over another optimizer than the one that training uses.",
            evidence=[f"it holds a {type(made.optimizer).__name__}, training uses a {type(optimizer).__name__}"],
            cure="Pass a function, which is called with the right one:\n"
            "schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        )


def scaled(rule: str | None, global_batch: int, base_batch: int | None) -> float:
    """By what the learning rate is multiplied for a global batch, given the one that it was chosen for.

    Args:
        rule: ``linear`` (SGD, arXiv:1706.02677), ``sqrt`` (Adam, arXiv:2205.10287), or None: 1.
        global_batch: samples per step, all ranks and the accumulation together.
        base_batch: samples per step that the learning rate was chosen for.

    Raises:
        TrainError: there is no such rule, or `base_batch` is missing.

    """
    if rule is None:
        return 1.0
    if rule not in ("linear", "sqrt"):
        raise TrainError(f"There is no rule {rule!r} to scale a learning rate.", cure="scale_lr='linear' or 'sqrt'")
    if not base_batch or base_batch < 0:
        raise TrainError(
            "For which global batch was the learning rate chosen?",
            evidence=[f"scale_lr={rule!r}, base_batch={base_batch!r}"],
            cure="Trainer(..., scale_lr='linear', base_batch=256)",
        )
    ratio = global_batch / base_batch
    return ratio if rule == "linear" else math.sqrt(ratio)
