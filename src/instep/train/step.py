"""One optimizer update: how. The trainer knows when."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.comm import gather_objects, get_logger
from instep.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.train.memory import Split
    from instep.train.precision import Precision
    from instep.train.strategies import Strategy
    from instep.train.windows import Micro, Window

Counted = tuple["Tensor | float", float]  # a mean, and its weight

_log = get_logger("instep.train")
_MOST_SKIPPED = 100  # in a row: nothing is learned any more


class Step:
    """Forward and backward over a window, the gradients' check and clipping, the update.

    Args:
        wrapped: the module that training calls.
        model: the bare module in it.
        optimizer: updated once per window.
        strategy: how the ranks share the work.
        precision: autocast and loss scaling.
        session: the world.
        training_step: gives the loss of a batch: its mean over the samples (or over what `weight` counts), or a dict
            with it as ``loss`` and further numbers to report.
        clip_norm: the largest norm of all gradients together; None: no clipping.
        non_finite: ``stop``: an error that names rank and step; ``skip``: no update at this step, on any rank.
        split: cuts micro-batches when the memory does not suffice; None: the error ends training.

    Attributes:
        on_gradients: called when the gradients are complete and not clipped yet; None where nobody listens.
        losses: (mean loss of a micro-batch, its weight), since the last call of :meth:`take_sums`; tensors where
            the number is on another device, so that nobody waits for it.
        skipped: steps without an update so far.
        forward_s: seconds spent in forward passes: this rank's own time, without waiting for others in gradients.

    """

    def __init__(
        self,
        wrapped: nn.Module,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: Strategy,
        precision: Precision,
        session: Session,
        training_step: Callable[[nn.Module, Any], Any],
        clip_norm: float | None = None,
        non_finite: str = "stop",
        split: Split | None = None,
    ) -> None:
        self.wrapped = wrapped
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.precision = precision
        self.session = session
        self.training_step = training_step
        self.clip_norm = clip_norm
        self.non_finite = non_finite
        self.split = split
        self.on_gradients: Callable[[], None] | None = None
        self.parameters = [one for one in wrapped.parameters() if one.requires_grad]
        self.losses: list[Counted] = []
        self.values: dict[str, list[Counted]] = {}
        self.skipped = 0
        self.forward_s = 0.0
        self._in_a_row = 0
        self._checked = False
        self._pending: list[tuple[int, Tensor, list[Counted]]] = []
        self._clears_plainly = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad

    def run(self, window: Window, step: int) -> None:
        """Make the update number `step` + 1.

        Raises:
            TrainError: a loss that is no scalar, a parameter without gradient, a number that is not finite.

        """
        before = len(self.losses)
        try:
            self._gradients(window)
        except RuntimeError as error:
            explained = self.strategy.explain(error, self.model)
            if explained is error:
                raise
            raise explained from None
        if not self._checked:
            self._checked = True
            if self.split is None:
                self.strategy.refuse_unused(self.model)
        found = self.precision.unscale_and_check(self.parameters, self.optimizer, self.strategy)
        if self.on_gradients is not None:
            self.on_gradients()
        if self.clip_norm is not None:
            self.strategy.clip(self.parameters, self.clip_norm)
        if found.is_cuda:  # the answer is on its way: it is read at the next tick, and no update is made meanwhile
            self._pending.append((step, found, self.losses[before:]))
        elif found.item():
            self.meet_non_finite(step, self.losses[before:], window)
            del self.losses[before:]
        else:
            self._in_a_row = 0
        self.precision.step(self.optimizer, found)
        self.precision.update()
        self._clear()

    def _clear(self) -> None:
        """Let the gradients go."""
        if not self._clears_plainly:
            self.optimizer.zero_grad(set_to_none=True)
            return
        # The very same without a profiler's range around it, which takes seven times as long for a small model.
        for group in self.optimizer.param_groups:
            for one in group["params"]:
                one.grad = None

    def _gradients(self, window: Window) -> None:
        if self.split is not None:
            self.split.run(self, window)
            return
        micros = window.micros
        for micro in micros[:-1]:
            with self.strategy.no_sync(self.wrapped):
                self.backward(self.wrapped, micro)
        self.backward(self.wrapped, micros[-1])

    def look_back(self) -> None:
        """Read what a GPU has found since the last call; all ranks do it together.

        Raises:
            TrainError: a loss or gradient was not finite, and that is to end training.

        """
        if not self._pending:
            return
        flags = torch.stack([found for _, found, _ in self._pending]).tolist()
        pending, self._pending = self._pending, []
        for flag, (step, _, losses) in zip(flags, pending, strict=True):
            if flag:
                self.meet_non_finite(step, losses, None)
                bad = {id(loss) for loss, _ in losses}
                self.losses = [pair for pair in self.losses if id(pair[0]) not in bad]
            else:
                self._in_a_row = 0

    def backward(self, model: nn.Module, micro: Micro) -> None:
        """Forward and backward of one micro-batch; its gradients are added to what is there."""
        start = time.perf_counter()
        with self.precision.autocast():
            given = self.training_step(model, micro.batch)
        self.forward_s += time.perf_counter() - start
        loss = given if isinstance(given, Tensor) else self._loss_of(given, micro)
        if loss.dim() or not loss.requires_grad:
            raise _no_loss(loss)
        if micro.weight:  # a repeated batch counts nothing
            self.losses.append((_number(loss), micro.weight))
        if micro.share != 1.0:
            loss = loss * micro.share
        self.precision.scale(loss).backward()

    def _loss_of(self, given: Any, micro: Micro) -> Tensor:
        if not isinstance(given, dict) or not isinstance(given.get("loss"), Tensor):
            raise TrainError(
                "The training step gave no loss.",
                evidence=[f"it returned a {type(given).__name__}: {given!r:.100}"],
                cure="Return the loss as a tensor, or a dict: {'loss': loss, 'accuracy': right / len(batch)}",
            )
        for name, value in given.items():
            if name != "loss" and micro.weight:
                self.values.setdefault(name, []).append((_number(value), micro.weight))
        loss: Tensor = given["loss"]
        return loss

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """By name: (sum of value x weight, sum of weights) since the last call, over this rank's micro-batches."""
        sums = {"loss": _sum(self.losses)} | {name: _sum(pairs) for name, pairs in self.values.items()}
        self.losses.clear()
        self.values.clear()
        return {name: pair for name, pair in sums.items() if pair[1]}

    def meet_non_finite(self, step: int, losses: list[Counted], window: Window | None) -> None:
        """All ranks come here for the same step, since the check of the gradients is shared.

        Args:
            step: updates done before.
            losses: this rank's of that step.
            window: its batches, None where they are gone.

        Raises:
            TrainError: naming the ranks and the step, unless such steps are to be skipped.

        """
        self.skipped += 1
        mine = [float(loss) for loss, _ in losses]
        bad = gather_objects([loss for loss in mine if not math.isfinite(loss)])
        if self.precision.name == "fp16" and not any(bad):
            return  # the scale of the loss was too large for a gradient; the next one is smaller
        self._in_a_row += 1
        what = f"The loss of step {step + 1} is not finite."
        evidence = [f"rank {rank}{self._on(rank)}: loss {one[0]}" for rank, one in enumerate(bad) if one]
        if not evidence:
            what = f"A gradient of step {step + 1} is not finite, though the loss is."
            evidence = self._blame(window)
        if self.non_finite == "skip" and self._in_a_row < _MOST_SKIPPED:
            if self.session.is_main:
                _log.warning("%s All ranks skip the update. %s", what, "; ".join(evidence))
            return
        if self.non_finite == "skip":
            what += f" It is the {self._in_a_row}th such step in a row."
        raise TrainError(
            what,
            evidence=evidence,
            cure="Look at that batch, at the learning rate, and at clip_norm.\n"
            "Trainer(..., non_finite='skip') leaves such steps out.",
        )

    def _blame(self, window: Window | None) -> list[str]:
        """Which ranks' own gradients are bad: computed once more, each rank for itself, where that is possible."""
        parameters = list(self.model.named_parameters())
        reduced = [f"gradient of {name}, of all ranks" for name, one in parameters if _is_bad(one.grad)][:5]
        if self.strategy.collective_forward or window is None:
            return reduced
        self.model.zero_grad(set_to_none=True)
        for micro in window.micros:
            if micro.weight:
                with self.precision.autocast():
                    given = self.training_step(self.model, micro.batch)
                (given if isinstance(given, Tensor) else given["loss"]).backward()
        mine = [name for name, one in parameters if _is_bad(one.grad)]
        found = enumerate(gather_objects(mine[:5]))
        blamed = [f"rank {rank}{self._on(rank)}: gradient of {', '.join(names)}" for rank, names in found if names]
        return blamed or reduced

    def _on(self, rank: int) -> str:
        return f" on {self.session.hosts[rank]}" if self.session.hosts else ""


def _is_bad(gradient: Tensor | None) -> bool:
    return gradient is not None and not bool(torch.isfinite(gradient).all())


def _number(value: Any) -> Tensor | float:
    """The number in it; still in a tensor where it is on another device."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu else value.detach()
    return float(value)


def _sum(pairs: list[Counted]) -> tuple[float, float]:
    """(sum of value x weight, sum of weights): one transfer from the device."""
    tensors = [value for value, _ in pairs if isinstance(value, Tensor)]
    fetched = iter(torch.stack(tensors).double().tolist() if tensors else ())
    values = [next(fetched) if isinstance(value, Tensor) else value for value, _ in pairs]
    weights = [weight for _, weight in pairs]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)), sum(weights)


def _no_loss(loss: Tensor) -> TrainError:
    if loss.dim():
        return TrainError(
            "The loss is no scalar.",
            evidence=[f"its shape is {list(loss.shape)}"],
            cure="Give the mean over the batch:  loss.mean()  (reduction='mean' in torch's losses)",
        )
    return TrainError(
        "The loss does not depend on any parameter.",
        evidence=["loss.requires_grad is False"],
        cure="Compute it from the model's outputs, without .item(), .detach() or torch.no_grad().",
    )
