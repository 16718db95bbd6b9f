"""R2 of our field notes: counts and samples equal to one process, whatever the world, the batch and the sampler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

import instep
from tests.data.cases import Numbers, by_step, epoch, flat, ranks

if TYPE_CHECKING:
    from collections.abc import Callable


SIZES = [1, 3, 5, 7, 10, 13]
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "subset 7 of 10": lambda: {"sampler": SubsetRandomSampler([9, 2, 4, 0, 7, 5, 1])},
    "weighted 13 of 10": lambda: {"sampler": WeightedRandomSampler([1.0 + i for i in range(10)], 13)},
}
TABLE = [(size, kind) for size in SIZES for kind in ("sequential", "shuffle")] + [
    (10, "subset 7 of 10"),
    (10, "weighted 13 of 10"),
]


@pytest.mark.parametrize(("size", "kind"), TABLE)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("as_loader", [False, True])
def test_exact(size: int, kind: str, world_size: int, batch_size: int, as_loader: bool) -> None:
    def divided(world: int, per_rank: int) -> list[Any]:
        options = ORDERS[kind]()
        if as_loader:
            return ranks(DataLoader(Numbers(size), batch_size=per_rank, **options), world)
        return ranks(Numbers(size), world, per_rank, **options)

    alone = divided(1, batch_size * world_size)
    loaders = divided(world_size, batch_size)
    for _ in range(2):
        whole, parts = epoch(alone[0]), [epoch(loader) for loader in loaders]

        assert sorted(flat(whole)) == sorted(i for batches in parts for i in flat(batches))
        assert [len(batches) for batches in parts] == [len(loader) for loader in loaders]
        assert loaders[0].counts() == tuple(len(flat(batches)) for batches in parts)
        for k, batch in enumerate(whole):
            assert sorted(batch) == sorted(i for batches in parts for i in flat(batches[k : k + 1]))
            assert loaders[-1].global_batch_size(k) == len(batch)
        assert loaders[0].steps == len(whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_drop_last_drops_the_global_batch(size: int, world_size: int) -> None:
    whole = by_step(ranks(Numbers(size), 1, 2 * world_size, shuffle=True))
    full = [batch for batch in whole if len(batch) == 2 * world_size]

    loaders = ranks(Numbers(size), world_size, 2, shuffle=True, drop_last=True)
    assert by_step(loaders) == full
    assert {len(loader) for loader in loaders} == {len(full)}


def test_fewer_samples_than_ranks() -> None:
    loaders = ranks(Numbers(2), 4, 8)

    assert [epoch(loader) for loader in loaders] == [[[0]], [[1]], [], []]
    assert [len(loader) for loader in loaders] == [1, 1, 0, 0]


def test_idle_ranks_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ranks(Numbers(9), 4, 2, shuffle=True)
    (record,) = caplog.records
    assert "3 of 4 ranks" in record.message
    assert "drop_last=True" in record.message
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        ranks(Numbers(9), 4, 2)  # looks like evaluation
        ranks(Numbers(9), 4, 2, shuffle=True, drop_last=True)
        ranks(Numbers(12), 4, 2, shuffle=True)  # every rank has a sample at the last step
        ranks(Numbers(9), 1, 2, shuffle=True)
    assert not caplog.records

    with caplog.at_level(logging.WARNING):
        ranks(Numbers(7), 4, 2, shuffle=True, drop_last=True)
    assert "leaves no step" in caplog.text


def test_a_loader_is_taken_over() -> None:
    def pairs(samples: Any) -> list[tuple[int, int]]:
        return [(i, -i) for i in samples]

    context = "forkserver"
    data = DataLoader(
        Numbers(9),
        batch_size=2,
        num_workers=1,
        collate_fn=pairs,
        timeout=30,
        prefetch_factor=3,
        multiprocessing_context=context,
        drop_last=True,
    )
    inner = instep.shard(data, rank=1, world_size=2)._loader

    assert (inner.num_workers, inner.collate_fn, inner.timeout, inner.prefetch_factor) == (1, pairs, 30, 3)
    assert inner.multiprocessing_context.get_start_method() == context
    plain = DataLoader(Numbers(9), batch_size=2, collate_fn=pairs, drop_last=True)
    assert list(instep.shard(plain, rank=1, world_size=2)) == [[(1, -1), (3, -3)], [(5, -5), (7, -7)]]


def test_the_user_worker_init_function_finds_the_user_dataset() -> None:
    for options in ({}, {"persistent_workers": True}):
        loader = instep.shard(Numbers(4), 2, num_workers=1, worker_init_fn=shrink, rank=0, world_size=1, **options)
        assert epoch(loader) == [[0, 1], [2, 3]]


def shrink(worker_id: int) -> None:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Numbers


def test_already_sharded_data_passes_through() -> None:
    loader = instep.shard([10, 11, 12], 2, rank=1, world_size=2, already_sharded=True)

    assert epoch(loader) == [[10, 11], [12]]
    assert len(loader) == 2
    with pytest.raises(instep.data.LengthUnknownError, match="other ranks"):
        loader.counts()
