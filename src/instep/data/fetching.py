"""Samples into batches: the random numbers of each batch are its own, and what can be gathered is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from instep.data.order import tell
from instep.data.randomness import Kept, derive, reseed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from instep.data.order import Draw


def seed_batch(seed: int, rank: int, epoch: int, position: int) -> None:
    """Put the random states of one batch in force: the same in every process that ever makes it."""
    reseed(derive("batch", seed, epoch, position, rank))


class Seeded(Dataset[Any]):
    """A dataset that is asked for a :class:`Draw`, and seeds the global generators before it fetches.

    They stay so, in a worker or inside :class:`~instep.data.randomness.Kept`: ``collate_fn`` draws on from there.

    Args:
        dataset: the user's dataset.
        seed: of the run.
        rank: of this process.

    """

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self.epoch = 0  # that the user's dataset has been told
        self._seed = seed
        self._rank = rank

    def __getitem__(self, asked: Draw) -> Any:
        self._begin(asked)
        return self.dataset[asked.index]

    def __getitems__(self, asked: Draw) -> Any:
        self._begin(asked)
        if many := getattr(self.dataset, "__getitems__", None):
            return many(asked.index)
        return [self.dataset[index] for index in asked.index]

    def _begin(self, asked: Draw) -> None:
        # Persistent workers hold a copy of the user's dataset, which the loader cannot tell.
        if asked.epoch != self.epoch and get_worker_info() is not None:
            self.epoch = asked.epoch
            tell(asked.epoch, self.dataset)
        seed_batch(self._seed, self._rank, asked.epoch, asked.position)


class WorkerStart:
    """A ``worker_init_fn`` that puts the user's dataset in ``get_worker_info()``, in place of our wrapper.

    Args:
        function: the user's own, called after that.

    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """Run in the worker with that id."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", vars(info.dataset)["dataset"])  # WorkerInfo guards against plain changes
        if self._function is not None:
            self._function(worker_id)


def batches_under(around: AbstractContextManager[None], loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader without workers, each made inside `around`."""
    with around:
        batches = iter(loader)
    return _each_under(around, batches)


def _each_under(around: AbstractContextManager[None], batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with around:
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def fetched(draws: Iterator[Draw], dataset: Seeded, collate: Callable[[Any], Any]) -> Iterator[Any]:
    """The batches of a map-style dataset, made in this process: what torch's DataLoader does, with less around it."""
    if collate is default_collate and draws_nothing(dataset.dataset):
        take = _gather(dataset.dataset) or (lambda index: _collated(dataset.dataset, index))
        return (take(draw.index) for draw in draws)
    return _fetched_under(Kept(), draws, dataset, collate)


def _fetched_under(
    around: Kept, draws: Iterator[Draw], dataset: Seeded, collate: Callable[[Any], Any]
) -> Iterator[Any]:
    for draw in draws:
        with around:
            batch = collate(dataset.__getitems__(draw))
        yield batch


def draws_nothing(dataset: Any) -> bool:
    """Whether fetching from the dataset can draw no random number: it is made of tensors, by torch's own classes."""
    kind = type(dataset)
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return kind is Tensor or (kind is TensorDataset and all(type(tensor) is Tensor for tensor in dataset.tensors))


def _collated(dataset: Any, index: Iterable[Any]) -> Any:
    return default_collate([dataset[i] for i in index])


def _gather(dataset: Any) -> Callable[[Any], Any] | None:
    """A function from indices to ``default_collate([dataset[i] for i in indices])``; None where there is none."""
    kind = type(dataset)
    if kind is Subset:
        return _gather_subset(dataset)
    tensors = [dataset] if kind is Tensor else dataset.tensors if kind is TensorDataset else []
    if not tensors or not all(map(_is_plain, tensors)):
        return None

    def take(index: Any) -> Any:
        index = [*index]
        try:
            numbers = np.array(index)  # four times as fast as torch.tensor
            if numbers.dtype != np.int64 or numbers.ndim != 1:
                return _collated(dataset, index)
            rows = torch.from_numpy(numbers)
            batch = [tensor.index_select(0, rows) for tensor in tensors]
        except (IndexError, RuntimeError, TypeError, ValueError):  # negative, outside, no numbers
            return _collated(dataset, index)
        return batch[0] if kind is Tensor else batch

    return take


def _gather_subset(subset: Subset[Any]) -> Callable[[Any], Any] | None:
    take, indices = _gather(subset.dataset), subset.indices
    return None if take is None else lambda index: take([indices[i] for i in index])


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()
