"""Metrics of torchmetrics over all ranks, merged by us.

torchmetrics would gather by itself, every rank taking part for every state. But a rank without data lacks states that
others have, or weighs in where states are not sums, and samples come rank by rank. Here only ranks with data count,
and what a metric keeps of each sample is put in dataset order, so that it finds what it would in one process.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.errors import TrainError
from instep.train.batches import leaves
from instep.train.gathering import gather
from instep.train.metrics import is_collection
from instep.train.trees import Items, Rows, on_cpu, take

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from instep.train.failures import Caught
    from instep.train.trees import Column

Key = tuple[str, str]  # (path of the metric in its collection or wrapper, name of the state)


class Foreign:
    """A metric of torchmetrics, a wrapper, or a collection, while an evaluation lasts.

    Args:
        name: what the user calls it.
        metric: the user's object; its states are reset before and after.

    Raises:
        TrainError: it does not say how its states are merged.

    """

    def __init__(self, name: str, metric: Any) -> None:
        modules = metric.named_modules() if callable(getattr(metric, "named_modules", None)) else ()
        # The metrics that hold states: those inside a collection or wrapper, too.
        self.parts: dict[str, Any] = {path: one for path, one in modules if hasattr(one, "_reductions")}
        self.name = name
        self.metric = metric
        if not self.parts:
            raise TrainError(
                f"The metric {name} does not say how its counts are merged over the ranks.",
                evidence=[f"{type(metric).__module__}.{type(metric).__qualname__} has update() and compute() only"],
                cure="Give a metric of torchmetrics, a subclass of instep.train.Metric, or a function of all outputs "
                "and targets.",
            )
        metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch; the metric goes where the outputs are."""
        device = next((leaf.device for leaf in leaves(outputs) if isinstance(leaf, Tensor)), None)
        if device is not None and any(part.device != device for part in self.parts.values()):
            self.metric.to(device)
        self.metric.update(outputs, targets)

    def merge(self, *, has_data: bool, to: int, order: Tensor | None, caught: Caught[Any]) -> States | None:
        """The states of all ranks that have data. All ranks call it.

        Args:
            has_data: whether this rank has seen a batch.
            to: the rank that gets them, one that has data.
            order: puts the rows of all ranks in dataset order, for states that have one row for each sample.
            caught: tells the others of a failure.

        Returns:
            The states, None on the other ranks.

        """
        states: States = {}
        kept: dict[Key, Column] = {}
        with caught:
            if has_data:
                states, kept = self._states()
        words = caught.exchange({key: _spec(column) for key, column in kept.items()})
        specs = _common(words)
        small = gather([[states] if has_data else []], [Items()], to, caught)
        columns = gather([_as(kept.get(key), spec) for key, spec in specs.items()], list(specs.values()), to, caught)
        if small is None or columns is None:
            return None
        everyone: Sequence[States] = small[0]  # type: ignore[assignment]  # what was put in
        merged = {
            (path, name): _reduced([one[path, name] for one in everyone], self.parts[path]._reductions[name])  # noqa: SLF001
            for path, name in everyone[0]
        }
        for key, column in zip(specs, columns, strict=True):
            fits = order is not None and len(order) == len(column)
            ordered = take(column, order if fits else None)
            merged[key] = [ordered] if isinstance(ordered, Tensor) else ordered
        return merged

    def compute(self, merged: States) -> Any:
        """The figure from the states of all ranks."""
        for (path, name), value in merged.items():
            part = self.parts[path]
            setattr(part, name, _on(value, part.device))
        with _without_sync(self.parts.values()):
            return self.metric.compute()

    def _states(self) -> tuple[States, dict[Key, Column]]:
        """(small states, states with rows of samples), on the CPU."""
        if is_collection(self.metric):
            self.metric.items(copy_state=True)  # members of a collection share states: now each has its own
        states: States = {}
        kept: dict[Key, Column] = {}
        for path, part in self.parts.items():
            for name, how in part._reductions.items():  # noqa: SLF001  # how torchmetrics declares them
                value = getattr(part, name)
                if isinstance(value, list) and _is_cat(how):
                    if value:
                        kept[path, name] = _joined(on_cpu(value))
                else:
                    states[path, name] = on_cpu(value)
        return states, kept


States = dict[Key, Any]


def _joined(pieces: list[Any]) -> Column:
    """What a metric appended batch by batch: one tensor, if it is of tensors that fit."""
    if not all(isinstance(one, Tensor) for one in pieces):
        return pieces
    tensors = [one if one.dim() else one.unsqueeze(0) for one in pieces]
    return torch.cat(tensors) if len({one.shape[1:] for one in tensors}) == 1 else pieces


def _spec(column: Column) -> Rows | Items:
    return Rows(column.dtype, tuple(column.shape[1:])) if isinstance(column, Tensor) else Items()


def _common(words: Sequence[Mapping[Key, Rows | Items]]) -> dict[Key, Rows | Items]:
    """What each state is on all ranks: rows where all agree, else a list of what each had."""
    specs: dict[Key, Rows | Items] = {}
    for word in words:
        for key, spec in word.items():
            specs[key] = spec if specs.get(key, spec) == spec else Items()
    return specs


def _as(column: Column | None, spec: Rows | Items) -> Column:
    if column is None:
        return torch.empty(0, *spec.shape, dtype=spec.dtype) if isinstance(spec, Rows) else []
    return [column] if isinstance(spec, Items) and isinstance(column, Tensor) else column


def _is_cat(how: Any) -> bool:
    return getattr(how, "__name__", how) in ("dim_zero_cat", "cat")


def _reduced(values: list[Any], how: Any) -> Any:
    """The states of the ranks with data made one, as torchmetrics does; of one rank alone it is what it is."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        flat = [item for value in values for item in value]
        return how(flat) if callable(how) else flat
    if _is_cat(how):
        return torch.cat([value if value.dim() else value.unsqueeze(0) for value in values])
    stacked = torch.stack(values)
    return how(stacked) if callable(how) else stacked


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(one, device) for one in value]
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def _without_sync(parts: Any) -> Iterator[None]:
    """Inside, torchmetrics does not talk to other ranks: they are not there."""
    before = [(part, part._to_sync) for part in parts]  # noqa: SLF001  # its only switch after construction
    for part, _ in before:
        part._to_sync = False  # noqa: SLF001
    try:
        yield
    finally:
        for part, value in before:
            part._to_sync = value  # noqa: SLF001
