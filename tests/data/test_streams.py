"""R16: streams are disjoint and complete over ranks and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import instep
from tests.data.cases import (
    AugmentedStream,
    ShuffledStream,
    SizedStream,
    Stream,
    WorkerStream,
    by_step,
    epoch,
    flat,
    ranks,
)
from tests.data.test_order import states

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("kind", [Stream, ShuffledStream, WorkerStream])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_R16_disjoint_complete_and_the_same_at_every_step(
    kind: type[Stream], world_size: int, workers: int, drop_last: bool
) -> None:
    whole = by_step(ranks(kind(31), 1, 6, drop_last=drop_last))
    loaders = ranks(kind(31), world_size, 6 // world_size, drop_last=drop_last, num_workers=workers)

    assert len(set(flat(whole))) == len(flat(whole)) == (30 if drop_last else 31)
    assert by_step(loaders) == whole
    second = by_step(loaders)
    assert len(set(flat(second))) == len(flat(second)) == len(flat(whole))
    assert (second == whole) is (kind is not ShuffledStream)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_fewer_samples_than_ranks_and_workers(size: int) -> None:
    loaders = ranks(SizedStream(size), 3, 2, num_workers=2)
    batches = [epoch(loader) for loader in loaders]

    assert sorted(i for mine in batches for batch in mine for i in batch) == list(range(size))
    assert [len(loader) for loader in loaders] == [len(mine) for mine in batches]


def test_a_loader_of_a_stream_is_taken_over() -> None:
    assert by_step(ranks(DataLoader(Stream(7), batch_size=2), 2)) == [[0, 1, 2, 3], [4, 5, 6]]
    assert [list(loader) for loader in ranks(DataLoader(Stream(7), batch_size=None), 2)] == [[0, 2, 4, 6], [1, 3, 5]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_R16_draws_of_a_stream_differ_everywhere_and_repeat(options: dict[str, Any]) -> None:
    def draws(loader: Any) -> list[Any]:
        return [sample for batch in loader for sample in zip(*(part.tolist() for part in batch), strict=True)]

    before = states()
    seen = [draws(loader) for loader in ranks(AugmentedStream(24), 2, 3, **options) for _ in range(2)]

    for generator in (1, 2, 3):
        assert len({sample[generator] for one in seen for sample in one}) == 48
    assert states() == before
    again = instep.shard(AugmentedStream(24), 3, rank=1, world_size=2, **options)
    again.epoch = 1
    assert draws(again) == seen[3]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_stream_is_told_the_epoch(options: dict[str, Any]) -> None:
    class Told(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter([self.epoch] * 2)

    loader = instep.shard(Told(2), 2, rank=0, world_size=1, **options)

    assert [epoch(loader), epoch(loader)] == [[[0, 0]], [[1, 1]]]
    loader.epoch = 7
    assert epoch(loader) == [[[7, 7]]][0]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_already_sharded_passes_through(options: dict[str, Any]) -> None:
    loader = instep.shard(WorkerStream(8), 2, rank=1, world_size=2, already_sharded=True, **options)

    assert sorted(flat(epoch(loader))) == list(range(8))


def test_length() -> None:
    assert [len(loader) for loader in ranks(SizedStream(7), 2, 2)] == [2, 2]
    unknown = instep.shard(Stream(3), 2, rank=0, world_size=1)
    with pytest.raises(instep.data.LengthUnknownError, match="no length"):
        len(unknown)
    assert [batch.tolist() for batch in list(unknown)] == [[0, 1], [2]]  # list() asks for len, and does without
