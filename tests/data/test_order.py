"""The order is a function of seed and epoch, and drawing it leaves no trace."""

# ruff: noqa: NPY002  # the legacy global generator is what is tested
from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

import instep
from tests.data.cases import SAMPLERS, Endless, Numbers, Pairs, by_step, epoch, flat, loader_over, ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


def disturb() -> None:
    torch.rand(7), np.random.random(3), random.random()


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_order_depends_on_seed_and_epoch_alone(kind: str) -> None:
    first = instep.shard(loader_over(SAMPLERS[kind](), 10, 4), seed=3, rank=0, world_size=1)
    epochs = [epoch(first) for _ in range(3)]
    disturb()
    again = instep.shard(loader_over(SAMPLERS[kind](), 10, 4), seed=3, rank=0, world_size=1)
    again.epoch = 1
    other = instep.shard(loader_over(SAMPLERS[kind](), 10, 4), seed=4, rank=0, world_size=1)

    assert epoch(again) == epochs[1]
    assert again.epoch == 2
    assert epoch(again) == epochs[2]
    again.set_epoch(0)
    assert epoch(again) == epochs[0]
    assert epochs[0] != epochs[1] != epochs[2]  # set_epoch was not forgotten
    assert epoch(other) != epochs[0]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_drawing_leaves_no_trace(kind: str) -> None:
    sampler = SAMPLERS[kind]()
    own = getattr(sampler, "generator", None)
    before, state = states(), own.get_state().tolist() if own else None

    loader = instep.shard(loader_over(sampler, 10, 4), rank=0, world_size=1)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        assert states() == before
        assert getattr(sampler, "generator", None) is own
    list(iterator)

    assert states() == before
    assert (own.get_state().tolist() if own else None) == state


def test_an_own_generator_is_given_back() -> None:
    sampler = SAMPLERS["own generator"]()
    before = str(sampler.random.bit_generator.state)

    epoch(instep.shard(loader_over(sampler, 10, 4), rank=0, world_size=1))

    assert str(sampler.random.bit_generator.state) == before


def test_interleaved_iterations_do_not_mix() -> None:
    loader = instep.shard(Numbers(12), 4, shuffle=True, rank=0, world_size=1)
    one, two = epoch(loader), epoch(loader)
    loader.epoch = 0
    pairs = list(zip(loader, loader, strict=True))

    assert [a.tolist() for a, _ in pairs] == one
    assert [b.tolist() for _, b in pairs] == two


def test_leaving_an_epoch_early_moves_on() -> None:
    loader = instep.shard(Numbers(12), 4, shuffle=True, rank=0, world_size=1)
    epochs = [epoch(loader), epoch(loader)]
    loader.epoch = 0
    next(iter(loader))

    assert epoch(loader) == epochs[1]


def test_endless_samplers_are_drawn_lazily() -> None:
    data = DataLoader(Numbers(100), batch_size=6, sampler=Endless(100))
    alone = [b.tolist() for b in islice(instep.shard(data, rank=0, world_size=1), 400)]
    three = [
        [b.tolist() for b in islice(loader, 400)]
        for loader in ranks(DataLoader(Numbers(100), batch_size=2, sampler=Endless(100)), 3)
    ]

    for k in range(400):  # further than is drawn at once
        assert sorted(alone[k]) == sorted(i for batches in three for i in batches[k])
    assert [batches[0] for batches in three] == [alone[0][r::3] for r in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_samplers_deal_their_batches_in_turn(world_size: int, drop_last: bool) -> None:
    def plain() -> DataLoader[Any]:
        return DataLoader(Numbers(10), batch_sampler=Pairs(10))

    alone = epoch(instep.shard(plain(), rank=0, world_size=1))
    loaders = ranks(plain(), world_size, drop_last=drop_last)
    rounds = len(alone) // world_size * world_size if drop_last else len(alone)

    for rank, loader in enumerate(loaders):
        assert len(loader) == len(alone[:rounds][rank::world_size])
        assert epoch(loader) == alone[:rounds][rank::world_size]
    if not drop_last:
        assert sorted(flat(alone)) == list(range(10))


def test_a_sampler_is_told_the_epoch() -> None:
    class Told(Sampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return iter([self.epoch] * 4)

    loader = instep.shard(Numbers(10), 2, sampler=Told(), rank=0, world_size=1)

    assert [epoch(loader)[0], epoch(loader)[0]] == [[0, 0], [1, 1]]


def test_without_batching_samples_come_one_by_one() -> None:
    data = DataLoader(Numbers(7), batch_size=None, sampler=RandomSampler(range(7)))
    alone = list(instep.shard(data, rank=0, world_size=1))

    assert sorted(alone) == list(range(7))
    assert [list(loader) for loader in ranks(data, 3)] == [alone[r::3] for r in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_the_same_with_workers(workers: int) -> None:
    whole = by_step(ranks(Numbers(50), 1, 6, shuffle=True))

    assert by_step(ranks(Numbers(50), 2, 3, shuffle=True, num_workers=workers)) == whole
