"""``evaluate``: loss and metrics over all samples of all ranks, equal to those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.comm import total
from instep.comm.order import alone
from instep.comm.session import together
from instep.errors import TrainError
from instep.train.failures import Caught
from instep.train.foreign import Foreign
from instep.train.keeping import Kept
from instep.train.lonely import no_collectives
from instep.train.metrics import Metric, figures, is_foreign, named, wide_sum
from instep.train.rounds import Source, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from instep.data.sharding import ShardedLoader
    from instep.train.metrics import Metrics

_WHERE = "evaluate()"


def evaluate(
    forward: Callable[[Any], tuple[Any, ...]],
    loader: ShardedLoader | Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    metrics: Metrics = None,
    weight: Callable[[Any], Any] | None = None,
    move: Callable[[Any], Any] | None = None,
    collective_forward: bool = False,
) -> dict[str, float]:
    """The mean loss and the metrics over all data, the same on every rank and for every number of ranks.

    ::

        model.eval()
        results = instep.train.evaluate(
            lambda batch: (model(batch[0]), batch[1]),
            instep.shard(data, 64),
            loss=nn.functional.cross_entropy,
            metrics={"accuracy": instep.train.Accuracy(), "f1": f1_of_everything},
        )

    All ranks call it; there is no collective until all batches are done. Each sample counts once: nothing is padded,
    and ranks with fewer samples or with none just arrive earlier. Every evaluation of a loader sees the same samples
    (its `epoch` is left as it is).

    **Metrics** are of three kinds, all exact:

    - a *function* ``f(outputs, targets)`` gets all outputs and targets of all ranks, in dataset order, and gives a
      number, or a dict of numbers. So any figure will do, also one that is no mean over samples (F1, AUC,
      perplexity). The price is memory: all outputs and targets are kept on the CPU, and come together on one rank,
      where the function is called, once. Let `forward` give no more than is needed.
    - a :class:`instep.train.Metric` counts batch by batch, and keeps nothing: :class:`instep.train.Accuracy`, ...
    - a metric of *torchmetrics*, or a MetricCollection. Its states are merged here, not by its own synchronisation.
      It is reset before and after.

    In outputs and targets every tensor has the samples as its first dimension. A tuple, dict or dataclass is several
    outputs, a list has one item per sample (of any kind); a list of tensors that have a row for each sample is several
    outputs, too, as torch's default_collate makes them. A number without rows is repeated for each sample.

    Args:
        forward: gives ``(outputs, targets)`` of a batch, or ``(outputs, targets, loss)`` with the mean loss of the
            batch or None. It is called without gradients; to put the model in eval mode is up to you.
        loader: what :func:`instep.shard` gives; in a world of one any iterable of batches.
        loss: gives the mean loss of a batch from outputs and targets, where `forward` does not.
        metrics: by name; or one metric or a list of them, which are called after their function or class.
        weight: what a batch weighs in the mean loss (its number of tokens); None: its number of samples.
        move: brings a batch to the device before `forward` gets it.
        collective_forward: a forward pass talks to the other ranks (FSDP), so that each rank has to take every one.
            Ranks without a batch left repeat their last one for nothing; it costs one small collective per batch.

    Returns:
        ``loss`` (where there is one) and the metrics; what gave a dict is called ``name/key``.

    Raises:
        TrainError: there are no data, the loader is not sharded, or loss or metrics do not give numbers.
        StepError: another rank has failed; the text says which, and how. The rank itself raises its own exception.
            (One that fails inside of a collective forward raises at once: only the launcher can end the others then.)

    """
    together(_WHERE)
    caught = Caught[dict[str, float]](_WHERE)
    tally: _Tally | None = None
    source: Source | tuple[()] = ()
    with caught:
        source = Source(loader, _WHERE)
        tally = _Tally(source, loss, named(metrics), weight)
    try:
        read(
            source,
            forward,
            tally.take if tally else _ignore,
            move=move,
            collective_forward=collective_forward,
            caught=caught,
        )
        return _conclude(tally, caught)
    finally:
        if tally:
            tally.reset()


class _Tally:
    """What this rank has seen."""

    def __init__(
        self,
        source: Source,
        loss: Callable[[Any, Any], Any] | None,
        metrics: dict[str, Any],
        weight: Callable[[Any], Any] | None,
    ) -> None:
        self.loss = loss
        self.weight = weight
        self.metrics = metrics
        self.counting = {name: one for name, one in metrics.items() if isinstance(one, Metric)}
        self.foreign = {name: Foreign(name, one) for name, one in metrics.items() if is_foreign(one)}
        self.functions = {
            name: one for name, one in metrics.items() if name not in self.counting and name not in self.foreign
        }
        self.kept = Kept(source.dealing, whole=source.whole, store=bool(self.functions))
        self.mean = _MeanLoss()
        for one in self.counting.values():
            one.reset()

    def take(self, batch: Any, size: int | None, result: Any) -> None:
        outputs, targets, loss = _taken_apart(result)
        if loss is None and self.loss is not None:
            loss = self.loss(outputs, targets)
        if loss is not None:
            if "loss" in self.metrics:
                raise TrainError("A metric is called 'loss', as the mean loss is.", cure="Call it something else.")
            self.mean.add(loss, size if self.weight is None else self.weight(batch))
        updates: list[Metric | Foreign] = [*self.counting.values(), *self.foreign.values()]
        for metric in updates:
            metric.update(outputs, targets)
        self.kept.add({"outputs": outputs, "targets": targets}, size)

    def reset(self) -> None:
        for one in self.foreign.values():
            one.metric.reset()


class _MeanLoss:
    """The sum of losses times weights, and of the weights; on the device, until the end."""

    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.weight: Any = 0
        self.batches = 0

    def add(self, loss: Any, weight: Any) -> None:
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
            raise TrainError(
                "The loss is no single number.",
                evidence=[f"{type(loss).__name__}: {shown}"],
                cure="Give the mean over the samples of the batch:  loss.mean()",
            )
        if weight is None:
            raise TrainError(
                "How many samples are in this batch? The mean loss has to know.",
                cure="Say it:  evaluate(..., weight=lambda batch: number)",
            )
        self.batches += 1
        self.weight = self.weight + weight
        product = wide_sum(loss) * weight
        # A batch that weighs nothing (no token counts) may have a loss of NaN.
        self.sum = self.sum + (
            torch.where(weight == 0, 0.0, product) if isinstance(weight, Tensor) else product if weight else 0.0
        )


def _conclude(tally: _Tally | None, caught: Caught[dict[str, float]]) -> dict[str, float]:
    """The figures, from what all ranks have seen."""
    words = caught.exchange((tally.kept.word(), tally.mean.batches) if tally else None)
    assert tally is not None  # or this rank has failed, and exchange() raised
    kept = [word for word, _ in words]
    if not any(word.rows for word in kept):
        raise TrainError(
            "There are no evaluation data: no rank got a batch.",
            cure="Look at the length of the dataset and, with drop_last, at the batch size.",
        )
    at = next(rank for rank, word in enumerate(kept) if word.rows)  # a rank that has all structures at hand
    results = _mean_loss(tally.mean, [(len(word.rows), losses) for word, losses in words])
    counts = {name: metric.total() for name, metric in tally.counting.items()}
    gathered = tally.kept.gather(kept, to=at, caught=caught) if tally.functions else None
    order = tally.kept.order(kept) if tally.foreign else None
    has_data = bool(tally.kept.batches)
    states = {
        name: foreign.merge(has_data=has_data, to=at, order=order, caught=caught)
        for name, foreign in tally.foreign.items()
    }

    def compute() -> dict[str, float]:
        values: dict[str, Any] = {}
        for name in tally.metrics:
            where = f"the metric {name or 'collection'}"
            with alone(where), no_collectives(where):
                if name in counts:
                    values[name] = tally.counting[name].compute(counts[name])
                elif name in states:
                    values[name] = tally.foreign[name].compute(states[name] or {})
                else:
                    assert gathered is not None
                    values[name] = tally.functions[name](gathered["outputs"], gathered["targets"])
        return _flat(values, results)

    return caught.once(at, compute)


def _mean_loss(mean: _MeanLoss, seen: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The loss over all ranks, whose (batches, losses) are given; nothing where there are no losses."""
    if not any(losses for _, losses in seen):
        return {}
    for rank, (batches, losses) in enumerate(seen):
        if batches != losses:
            raise TrainError(
                "Some batches have a loss, and some have none.",
                evidence=[f"rank {rank}: {batches} batches, {losses} losses"],
                cure="Let forward give a loss for each batch, or for none.",
            )
    both = total({"sum": mean.sum, "weight": mean.weight})
    if not both["weight"]:
        raise TrainError("There is no mean loss: all batches together weigh nothing.", cure="Look at weight=...")
    return {"loss": both["sum"] / both["weight"]}


def _flat(values: dict[str, Any], results: dict[str, float]) -> dict[str, float]:
    flat = dict(results)
    for name, value in values.items():
        for key, figure in figures(name, value).items():
            if key in flat:
                raise TrainError(f"Two figures are called {key!r}.", cure='Name the metrics:  metrics={"name": ...}')
            flat[key] = figure
    if not flat:
        raise TrainError("There is nothing to evaluate: no loss and no metric.", cure="evaluate(..., metrics=...)")
    return flat


def _taken_apart(result: Any) -> tuple[Any, Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return (*result, None)
    if isinstance(result, tuple) and len(result) == 3:
        return result
    shown = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    raise TrainError(
        "What forward gave is neither (outputs, targets) nor (outputs, targets, loss).",
        evidence=[f"it gave: {shown}"],
        cure="evaluate(lambda batch: (model(batch[0]), batch[1]), ...)",
    )


def _ignore(batch: Any, size: int | None, result: Any) -> None:
    """Nothing to do: this rank has failed already."""
