"""The order of an epoch: a function of seed and epoch, whatever the sampler draws it from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Dataset, Sampler, get_worker_info

from instep.data.randomness import Randomness, derive, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from instep.data.partition import Partition

_DRAWN_AT_ONCE = 1024


class Draw(NamedTuple):
    """What the loader is to fetch, and for which epoch: how a persistent worker learns that a new one has begun."""

    epoch: int
    index: Any


def parts(sampler: object) -> list[object]:
    """The sampler and the samplers inside it: a batch sampler's ``sampler``, a wrapper's ``base``."""
    found: list[object] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if any(part is known for known in found):
            continue
        found.append(part)
        inner = getattr(part, "__dict__", {})
        waiting += [v for name, v in inner.items() if isinstance(v, Sampler) or name in {"sampler", "batch_sampler"}]
    return found


def draw(sampler: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """The sampler's order for one epoch, drawn lazily; nothing outside is read, and nothing is disturbed.

    Samplers that draw from the global generators of torch, numpy or random, or from generators that they keep as
    attributes, find seeded ones while they draw. One that wants to know the epoch is told.
    """
    inside = parts(sampler)
    tell(epoch, *inside)
    randomness = Randomness(derive("order", seed, epoch), owners=inside)
    return within(lambda: randomness, sampler, _DRAWN_AT_ONCE)


def tell(epoch: int, *listeners: object) -> None:
    """Call ``set_epoch(epoch)`` on those that have it."""
    for listener in listeners:
        if callable(set_epoch := getattr(listener, "set_epoch", None)):
            set_epoch(epoch)


class RankSampler(Sampler[Any]):
    """What one rank fetches, epoch by epoch: the sampler that our DataLoader gets.

    Args:
        source: the sampler of the whole, as one process would use it.
        partition: how each global batch is dealt out.
        rank: whose share this is.
        seed: with `epoch` the only thing that the order depends on.
        whole: the units of `source` are fetched as they are, not gathered into a batch.
        labelled: each batch carries its epoch, for persistent workers.

    """

    def __init__(
        self, source: Iterable[Any], partition: Partition, *, rank: int, seed: int, whole: bool, labelled: bool
    ) -> None:
        self.source = source
        self.partition = partition
        self.rank = rank
        self.seed = seed
        self.whole = whole
        self.labelled = labelled
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        # The epoch is read now, not when the first batch is: another iteration may have begun by then.
        return self._fetches(self.epoch, draw(self.source, self.seed, self.epoch))

    def _fetches(self, epoch: int, order: Iterator[Any]) -> Iterator[Any]:
        for _, mine in self.partition.share(order, self.rank):
            index = mine[0] if self.whole else mine
            yield Draw(epoch, index) if self.labelled else index


class EpochSeeded(Dataset[Any]):
    """A dataset in persistent workers, which torch seeds once for all epochs: seeded anew when an epoch begins."""

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._rank = rank
        self._epoch: int | None = None

    def __getitem__(self, asked: Draw) -> Any:
        self._begin(asked.epoch)
        return self.dataset[asked.index]

    def __getitems__(self, asked: Draw) -> list[Any]:
        self._begin(asked.epoch)
        if many := getattr(self.dataset, "__getitems__", None):
            return list(many(asked.index))
        return [self.dataset[index] for index in asked.index]

    def _begin(self, epoch: int) -> None:
        info = get_worker_info()
        if epoch == self._epoch or info is None:
            return
        self._epoch = epoch
        tell(epoch, self.dataset)
        Randomness(derive("worker", self._seed, epoch, self._rank, info.id)).stay()


class WorkerStart:
    """The user's ``worker_init_fn``, which is to find the user's dataset in ``get_worker_info()``, not our wrapper."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """Run it in the worker with that id."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", vars(info.dataset)["dataset"])  # WorkerInfo guards against plain changes
        self._function(worker_id)
