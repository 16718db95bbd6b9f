"""Metrics that count: exact on any number of ranks, without keeping outputs."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.comm import total
from instep.errors import TrainError


class Metric(ABC):
    """A figure over all samples, made of counts and sums that can be added over batches and ranks.

    ::

        class Within(instep.train.Metric):
            def start(self):
                return {"within": 0, "all": 0}

            def update(self, outputs, targets):
                self.counts["within"] += ((outputs - targets).abs() < 0.5).sum()
                self.counts["all"] += targets.numel()

            def compute(self, counts):
                return counts["within"] / counts["all"]

    Sums may stay tensors on their device: they are read once, in the end. Whole numbers stay whole over all ranks;
    where sums of floats matter in the last digit, sum in float64.

    Attributes:
        counts: this rank's counts so far.

    """

    counts: dict[str, Any]

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """The counts before the first batch: numbers or tensors, of the same names and shapes on every rank."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch to :attr:`counts`."""

    @abstractmethod
    def compute(self, counts: dict[str, Any]) -> Any:
        """The figure, or a dict of figures, from the counts of all ranks together."""

    def reset(self) -> None:
        """Forget all batches."""
        self.counts = self.start()

    def total(self) -> dict[str, Any]:
        """The counts of all ranks together. All ranks call it."""
        arrays = {name for name, one in self.start().items() if isinstance(one, Tensor) and one.numel() != 1}
        numbers = total({name: one for name, one in self.counts.items() if name not in arrays})
        return {name: total(one) if name in arrays else numbers[name] for name, one in self.counts.items()}


class Accuracy(Metric):
    """The share of samples (or tokens, or pixels) whose class is among the `top_k` of highest score.

    Outputs are scores ``[samples, classes, ...]`` or ``[samples, ..., classes]`` for targets ``[samples, ...]``, or
    classes themselves, whole numbers in the shape of the targets.

    Args:
        top_k: how many guesses count.
        ignore_index: targets of this value do not count, as in ``torch.nn.functional.cross_entropy``.

    """

    def __init__(self, top_k: int = 1, *, ignore_index: int | None = None) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise TrainError(f"Accuracy(top_k={top_k!r}) is no number of guesses.", cure="Accuracy(top_k=5)")
        self.top_k = top_k
        self.ignore_index = ignore_index
        self.reset()

    def start(self) -> dict[str, Any]:
        """No guess yet."""
        return {"right": 0, "all": 0}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the right guesses.

        Raises:
            TrainError: outputs and targets do not have the shapes that are said above.

        """
        right = self._right(outputs, targets)
        if self.ignore_index is None:
            self.counts["right"] += right.sum()
            self.counts["all"] += right.numel()
        else:
            counted = targets != self.ignore_index
            self.counts["right"] += (right & counted).sum()
            self.counts["all"] += counted.sum()

    def compute(self, counts: dict[str, Any]) -> float:
        """Right guesses of all; NaN where nothing counts."""
        return counts["right"] / counts["all"] if counts["all"] else math.nan

    def _right(self, outputs: Any, targets: Any) -> Tensor:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            raise _unfit("Accuracy needs tensors.", outputs, targets)
        if targets.is_floating_point():
            raise _unfit("Accuracy needs classes as targets, and these are no whole numbers.", outputs, targets)
        if outputs.shape == targets.shape and not outputs.is_floating_point() and self.top_k == 1:
            return outputs == targets
        if outputs.dim() < 2 or outputs.dim() != targets.dim() + 1:
            raise _unfit("Accuracy cannot compare these outputs with these targets.", outputs, targets)
        # torch puts classes second (cross_entropy), language models put them last.
        classes = 1 if (*outputs.shape[:1], *outputs.shape[2:]) == targets.shape else outputs.dim() - 1
        scores = outputs.movedim(classes, -1)
        if scores.shape[:-1] != targets.shape:
            raise _unfit("Accuracy cannot compare these outputs with these targets.", outputs, targets)
        if self.top_k > scores.shape[-1]:
            raise _unfit(f"There are fewer classes than top_k={self.top_k}.", outputs, targets)
        if self.top_k == 1:
            return scores.argmax(-1) == targets
        return (scores.topk(self.top_k, dim=-1).indices == targets.unsqueeze(-1)).any(-1)


class Mean(Metric):
    """The mean of a value that each sample has: ``Mean(lambda outputs, targets: (outputs - targets).abs())``.

    Args:
        function: gives the values of a batch from outputs and targets: a tensor of any shape; every element counts.

    """

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        if not callable(function):
            raise TrainError(
                f"Mean({function!r:.50}) needs a function of outputs and targets.",
                cure="Mean(lambda outputs, targets: (outputs - targets).abs())",
            )
        self.function = function
        self.reset()

    def start(self) -> dict[str, Any]:
        """No sample yet."""
        return {"sum": 0, "all": 0}

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the values of a batch.

        Raises:
            TrainError: the function gave one number for the whole batch, which hides how many samples it stands for.

        """
        values = torch.as_tensor(self.function(outputs, targets))
        if not values.dim():
            raise TrainError(
                "Mean() needs the value of each sample, and its function gave one number for the whole batch.",
                evidence=[repr(values)[:100]],
                cure="Leave out the mean or sum in it.",
            )
        self.counts["sum"] += wide_sum(values)
        self.counts["all"] += values.numel()

    def compute(self, counts: dict[str, Any]) -> float:
        """Sum by count; NaN where there is no sample."""
        return counts["sum"] / counts["all"] if counts["all"] else math.nan


Metrics = Mapping[str, Any] | Sequence[Any] | Metric | Callable[..., Any] | None


def named(metrics: Any) -> dict[str, Any]:
    """The metrics by name; those without one are called after their function or class.

    Raises:
        TrainError: something among them is no metric, has no name, or has that of another.

    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and not _is_metric(metrics):
        found = list(metrics.items())
    elif isinstance(metrics, (list, tuple)):
        found = [(_name(one), one) for one in metrics]
    else:
        found = [(_name(metrics), metrics)]
    names = [name for name, _ in found]
    for name, one in found:
        if not isinstance(name, str) or not (name or is_collection(one)):
            raise TrainError(f"A metric is called {name!r}: a name is a text.", cure='metrics={"accuracy": ...}')
        if not _is_metric(one) or isinstance(one, type):
            hint = "an instance:  " + f"{one.__name__}(...)" if isinstance(one, type) else 'metrics={"accuracy": ...}'
            raise TrainError(f"This is no metric: {name}.", evidence=[f"{one!r:.80}"], cure=f"Give {hint}")
        if names.count(name) > 1:
            raise TrainError(f"Two metrics are called {name!r}.", cure='Name them:  metrics={"one": ..., "other": ...}')
    return dict(found)


def figures(name: str, value: Any) -> dict[str, float]:
    """What a metric gave, by name: a dict becomes ``name/key``.

    Raises:
        TrainError: it is no number.

    """
    if isinstance(value, Mapping):
        # A collection of metrics without a name of its own keeps the names in it.
        return {f"{name}/{key}" if name else str(key): _number(f"{name}[{key!r}]", one) for key, one in value.items()}
    return {name: _number(name, value)}


def wide_sum(values: Tensor) -> Tensor:
    """The sum in float64 (whole numbers: int64), on the CPU where the device has no float64."""
    if not values.is_floating_point():
        return values.sum()
    if values.device.type == "mps":
        values = values.cpu()
    return values.detach().sum(dtype=torch.float64)


def _number(name: str, value: Any) -> float:
    size = getattr(value, "size", None)
    if callable(getattr(value, "item", None)) and (value.numel() if callable(size) else size) == 1:
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    shown = f"{type(value).__name__} of shape {list(value.shape)}" if hasattr(value, "shape") else f"{value!r:.80}"
    raise TrainError(
        f"The metric {name} gives no number.",
        evidence=[f"it gave: {shown}"],
        cure="Return one number, or a dict of numbers.",
    )


def _name(metric: Any) -> str:
    if is_collection(metric):
        return ""
    own = getattr(metric, "__name__", type(metric).__name__)
    if own == "<lambda>":
        raise TrainError("A lambda has no name to report.", cure='metrics={"name": lambda outputs, targets: ...}')
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own).lower()


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric) or callable(value) or is_foreign(value)


def is_foreign(value: Any) -> bool:
    """Whether it is a metric of torchmetrics, or a collection of them (also where torchmetrics is not installed)."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset")) and not isinstance(
        value, Metric
    )


def is_collection(value: Any) -> bool:
    """Whether it is a collection of torchmetrics' metrics, which have names in it."""
    return is_foreign(value) and callable(getattr(value, "items", None))


def _unfit(what: str, outputs: Any, targets: Any) -> TrainError:
    shown = [
        f"{name}: {one.dtype} {list(one.shape)}" if isinstance(one, Tensor) else f"{name}: {type(one).__name__}"
        for name, one in (("outputs", outputs), ("targets", targets))
    ]
    return TrainError(
        what,
        evidence=shown,
        cure="Scores [samples, classes, ...] with classes [samples, ...], or your own subclass of Metric.",
    )
