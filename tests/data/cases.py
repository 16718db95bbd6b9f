"""Datasets and samplers that the tests divide."""

# ruff: noqa: NPY002  # the legacy global generator is what is tested
from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import instep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Augmented(Numbers):
    """Each sample comes with a draw from each of the three global generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.random()), random.random()


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class ShuffledStream(Stream):
    """Draws its order from the global generator, as streams with a shuffle buffer do."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(self.size).tolist()


class AugmentedStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            yield index, torch.rand(()).item(), float(np.random.random()), random.random()


class WorkerStream(Stream):
    """Divides itself among the workers of one process, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(self.size)) if info is None else iter(range(info.id, self.size, info.num_workers))


class NumpySampler(Sampler[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        yield from np.random.permutation(self.size).tolist()


class PythonSampler(NumpySampler):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        yield from order


class OwnGeneratorSampler(NumpySampler):
    """Keeps a numpy generator that goes on from epoch to epoch."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.random = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        yield from self.random.permutation(self.size).tolist()


class Endless(Sampler[Any]):
    """Draws one index at a time from the global generator, for ever."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for _ in count():
            yield int(torch.randint(self.size, ()))


class Pairs(Sampler[Any]):
    """A batch sampler with batches of two kinds of length."""

    def __init__(self, size: int) -> None:
        self.sampler = RandomSampler(range(size))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Any]:
        order = list(self.sampler)
        for at in range(0, len(order), 3):
            yield order[at : at + 2]
            if rest := order[at + 2 : at + 3]:
                yield rest


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(10)),
    "generator": lambda: RandomSampler(range(10), generator=torch.Generator()),
    "replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=17),
    "subset": lambda: SubsetRandomSampler([9, 2, 4, 0, 7, 5, 1]),
    "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(10)], 13),
    "numpy": lambda: NumpySampler(10),
    "python": lambda: PythonSampler(10),
    "own generator": lambda: OwnGeneratorSampler(10),
}


def ranks(data: Any, world_size: int, batch_size: int | None = None, **options: Any) -> list[instep.data.ShardedLoader]:
    return [instep.shard(data, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def epoch(loader: Any) -> list[list[int]]:
    """One epoch's batches as lists."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def by_step(loaders: list[Any]) -> list[list[int]]:
    """What all ranks together see at each step, sorted."""
    all_batches = [epoch(loader) for loader in loaders]
    steps = max(map(len, all_batches))
    return [sorted(i for batches in all_batches for i in flat(batches[k : k + 1])) for k in range(steps)]


def loader_over(sampler: Any, size: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch_size, sampler=sampler, **options)
