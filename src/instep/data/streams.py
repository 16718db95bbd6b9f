"""Iterable datasets: every rank and worker reads the same stream and keeps its share of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from instep.data.fetching import seed_batch
from instep.data.order import tell
from instep.data.randomness import Randomness, derive, reseed, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instep.data.partition import Partition

_READ_AT_ONCE = 64


class OwnStream(IterableDataset[Any]):
    """A stream that shards itself, handed on as it is; only the epoch and the workers' seeds are looked after.

    Args:
        dataset: the user's stream.
        seed: of the run.
        rank: of this process.
        persistent: the workers outlive an epoch.

    """

    def __init__(self, dataset: IterableDataset[Any], *, seed: int, rank: int, persistent: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self._at = torch.zeros(2, dtype=torch.int64)
        if persistent:
            # The workers hold a copy of this object, and have to learn from the loader where to begin.
            self._at.share_memory_()

    def begin(self, epoch: int, start: int) -> None:
        """The next iteration, in this process or in its workers, reads `epoch`, from position `start` on."""
        self._at[0], self._at[1] = epoch, start

    def __iter__(self) -> Iterator[Any]:
        epoch, _ = self._at.tolist()
        tell(epoch, self.dataset)
        if (info := get_worker_info()) is not None:
            reseed(derive("worker", self.seed, epoch, self.rank, info.id))
        return iter(self.dataset)


class SharedStream(OwnStream):
    """One rank's share of a stream that every rank reads from its beginning.

    Each global batch is dealt out to the ranks; of W workers, worker w makes this rank's part of the global batches
    w, w + W, ... The loader asks its workers in turn, so the batches come in the stream's order whatever the number
    of workers.

    Args:
        dataset: the user's stream.
        partition: how the global batches are dealt out.
        about: see :class:`OwnStream`.

    """

    def __init__(self, dataset: IterableDataset[Any], partition: Partition, **about: Any) -> None:
        super().__init__(dataset, **about)
        self.partition = partition

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._at.tolist()
        tell(epoch, self.dataset)
        # The same randomness on every rank and worker, or a stream that shuffles would not be one stream.
        randomness = Randomness(derive("stream", self.seed, epoch), owners=[self.dataset])
        block = min(self.partition.block, _READ_AT_ONCE)
        return self._share(epoch, start, within(lambda: _as_one_process(randomness), self.dataset, block))

    def _share(self, epoch: int, start: int, stream: Iterator[Any]) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for position, mine in self.partition.share(stream, self.rank, start):
            if (position - start) // self.partition.block % workers == worker:
                seed_batch(self.seed, self.rank, epoch, position)  # for collate_fn
                yield from mine


@contextmanager
def _as_one_process(randomness: Randomness) -> Iterator[None]:
    """Read the dataset as if there were no workers: one that divides itself among them would be divided twice."""
    info, torch_worker._worker_info = torch_worker._worker_info, None  # noqa: SLF001  # there is no public way
    try:
        with randomness:
            yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001
