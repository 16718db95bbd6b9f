"""What a batch is made of: its own random numbers, and the same values as torch's DataLoader would give."""

# ruff: noqa: NPY002  # the legacy global generator is what is tested
from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, get_worker_info

import instep
from instep.data.fetching import draws_nothing
from instep.data.randomness import Kept
from tests.data.cases import Augmented, Numbers, NumpySampler, epoch, ranks
from tests.data.test_order import states
from tests.data.test_resume import WORKERS, equal, noisy

if TYPE_CHECKING:
    from collections.abc import Callable

X, Y = torch.arange(26.0).reshape(13, 2), torch.arange(13)


class Sub(TensorDataset):
    """Another class, which may do as it likes."""


ODD: list[Any] = [3, np.int64(4), torch.tensor(5), -1, 2, 1, 0]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4},
    {"batch_size": 2, "sampler": ODD},
    {"batch_sampler": [[3, 1, 2], [-1], torch.tensor([0, 4])]},
]

PLAIN: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(X, Y),
    "one tensor": lambda: TensorDataset(X),
    "a tensor": lambda: Y,
    "not contiguous": lambda: TensorDataset(X.repeat(1, 2)[:, ::2], Y),
    "empty rows": lambda: TensorDataset(torch.zeros(13, 0), Y.bool()),
    "a subset": lambda: Subset(TensorDataset(X, Y), range(12, -1, -1)),
    "a subset by a tensor": lambda: Subset(TensorDataset(X, Y), torch.arange(13)),  # type: ignore[arg-type]
    "a subset of a subset": lambda: Subset(Subset(TensorDataset(X, Y), list(range(13))), [*range(6), *range(7)]),
    "several": lambda: ConcatDataset([TensorDataset(X[:5], Y[:5]), Subset(TensorDataset(X, Y), range(8))]),
}
OTHER: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: Sub(X, Y),
    "a list": lambda: list(zip(range(13), "abcdefghijklm", strict=True)),
    "dicts": lambda: [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
    "a subset of another class": lambda: Subset(Sub(X, Y), range(13)),
    "several of another class": lambda: ConcatDataset([Sub(X, Y)]),
}


@pytest.mark.parametrize("kind", [*PLAIN, *OTHER])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_are_those_of_torch(kind: str, options: dict[str, Any]) -> None:
    data = {**PLAIN, **OTHER}[kind]()

    found = list(instep.shard(DataLoader(data, **options), rank=0, world_size=1))
    assert equal(found, list(DataLoader(data, **options)))
    assert draws_nothing(data) is (kind in PLAIN)


def test_a_batch_is_no_view_of_the_data() -> None:
    x = torch.zeros(4)
    for (batch,) in instep.shard(TensorDataset(x), 4, rank=0, world_size=1):
        batch.add_(1)

    assert x.tolist() == [0] * 4


def test_an_index_outside_is_an_error() -> None:
    with pytest.raises(IndexError):
        list(instep.shard(TensorDataset(X), 2, sampler=[0, 13], rank=0, world_size=1))


@pytest.mark.parametrize("workers", WORKERS)
def test_R16_draws_differ_by_rank_batch_and_epoch_and_repeat(workers: str) -> None:
    def draws(loader: Any) -> list[Any]:
        return [sample for batch in loader for sample in zip(*(part.tolist() for part in batch), strict=True)]

    before = states()
    loaders = ranks(Augmented(24), 2, 3, seed=1, **WORKERS[workers])
    seen = [draws(loader) for loader in loaders for _ in range(2)]  # by rank and epoch

    for generator in (1, 2, 3):
        values = [sample[generator] for one in seen for sample in one]
        assert len(values) == 48
        assert len(set(values)) == 48  # no two ranks, epochs, workers or samples alike
    assert states() == before
    again = instep.shard(Augmented(24), 3, seed=1, rank=1, world_size=2)  # whatever the workers
    again.epoch = 1
    assert draws(again) == seen[3]
    other = instep.shard(Augmented(24), 3, seed=2, rank=1, world_size=2)
    assert not {sample[1] for sample in draws(other)} & {sample[1] for one in seen for sample in one}


def test_collate_draws_from_the_same_seed() -> None:
    batches = [
        list(instep.shard(Augmented(8), 2, collate_fn=noisy, rank=0, world_size=1, **o)) for o in WORKERS.values()
    ]

    assert all(equal(a, b) for a, b in pairwise(batches))
    assert len({noise.item() for _, noise in batches[0]}) == 4


class Shy(Dataset[Any]):
    """Looks itself up, as datasets in workers may."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return len(self.told), self.told[-1], info is None or info.dataset is self


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_finds_itself_and_is_told_each_epoch_once(workers: str) -> None:
    loader = instep.shard(Shy(), 2, rank=0, world_size=1, **WORKERS[workers])

    seen = [[part.tolist() for part in batch] for _ in range(3) for batch in loader]
    assert seen == [[[k + 1] * 2, [k] * 2, [True] * 2] for k in range(3)]


def test_states_are_kept_whatever_is_drawn() -> None:
    kept = Kept()
    for _ in range(3):
        for draw in (lambda: None, np.random.randn, np.random.rand, lambda: (np.random.randn(), np.random.randn())):
            draw()  # the program's own: sometimes half a pair of Gaussian numbers is left
            before = states()
            for inside in (np.random.randn, np.random.rand, random.random, lambda: torch.rand(1)):
                with kept:
                    inside()
                assert states() == before


def test_states_are_kept_with_another_bit_generator() -> None:
    numpy: Any = np.random
    before, mersenne = np.random.get_state(), numpy.get_bit_generator()
    try:
        numpy.set_bit_generator(np.random.PCG64(1))
        state, kept = np.random.get_state(legacy=False), Kept()
        for _ in range(2):
            with kept:
                np.random.randn(3)
            assert np.random.get_state(legacy=False) == state
    finally:
        numpy.set_bit_generator(mersenne)
        np.random.set_state(before)


def test_a_numpy_sampler_is_read_beside_it() -> None:
    alone = epoch(instep.shard(Numbers(9), 4, sampler=NumpySampler(9), rank=0, world_size=1))

    batches = list(instep.shard(Augmented(9), 4, sampler=NumpySampler(9), rank=0, world_size=1))
    assert [index.tolist() for index, *_ in batches] == alone
