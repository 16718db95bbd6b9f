"""Iterable datasets: every rank and worker reads the same stream and keeps its share of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from instep.data.order import tell
from instep.data.randomness import Randomness, derive, within

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
        self._epoch = torch.zeros((), dtype=torch.int64)
        if persistent:
            # The workers hold a copy of this object, and have to learn the epoch from the loader.
            self._epoch.share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads, in this process and in its workers."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(value)

    def __iter__(self) -> Iterator[Any]:
        self._begin(self.epoch)
        return iter(self.dataset)

    def _begin(self, epoch: int) -> None:
        tell(epoch, self.dataset)
        if (info := get_worker_info()) is not None:
            Randomness(derive("worker", self.seed, epoch, self.rank, info.id)).stay()


class SharedStream(OwnStream):
    """One rank's share of a stream that every rank reads from its beginning.

    Sample i belongs to rank ``i % world_size`` and global batch ``i // block``; of W workers, worker w makes the
    global batches w, w + W, ... The loader asks its workers in turn, so the batches come in the stream's order
    whatever the number of workers.

    Args:
        partition: how the global batches are dealt out.

    """

    def __init__(
        self, dataset: IterableDataset[Any], partition: Partition, *, seed: int, rank: int, persistent: bool
    ) -> None:
        super().__init__(dataset, seed=seed, rank=rank, persistent=persistent)
        self.partition = partition

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        self._begin(epoch)
        # The same randomness on every rank and worker, or a stream that shuffles would not be one stream.
        randomness = Randomness(derive("stream", self.seed, epoch), owners=[self.dataset])
        block = min(self.partition.block, _READ_AT_ONCE)
        return self._share(within(lambda: _as_one_process(randomness), self.dataset, block))

    def _share(self, stream: Iterator[Any]) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for step, mine in self.partition.share(stream, self.rank):
            if step % workers == worker:
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
