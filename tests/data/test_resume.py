"""R1 and R6 of our field notes, for a loader: a stop inside an epoch loses nothing, at any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import instep
from instep.errors import DataError
from tests.data.cases import (
    SAMPLERS,
    Augmented,
    AugmentedStream,
    Endless,
    Numbers,
    Pairs,
    ShuffledStream,
    SizedStream,
    Stream,
    WorkerStream,
    epoch,
    flat,
    loader_over,
    ranks,
)
from tests.harness import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

WORKERS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}
DATA: dict[str, Callable[[], Any]] = {
    "map-style": lambda: Augmented(31),
    "stream": lambda: AugmentedStream(31),
    "shuffled stream": lambda: ShuffledStream(31),
    "tensors": lambda: TensorDataset(torch.arange(31)),
}


class Logged(Numbers):
    """Writes down what is fetched, in whatever process."""

    def __init__(self, size: int, file: Path) -> None:
        super().__init__(size)
        self.file = file

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return index, torch.rand(2)

    def fetched(self) -> Counter[int]:
        return Counter(map(int, self.file.read_text().split())) if self.file.exists() else Counter()


def noisy(samples: Sequence[Any]) -> Any:
    """A collate_fn that draws."""
    return torch.utils.data.default_collate(list(samples)), torch.rand(1)


def equal(one: Any, other: Any) -> bool:
    """The same nested values, bit by bit."""
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return equal(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_comes_after_is_bit_equal(kind: str, workers: str, world_size: int) -> None:
    about: dict[str, Any] = {"collate_fn": noisy, "seed": 5, "rank": world_size // 2, "world_size": world_size}
    loader = instep.shard(DATA[kind](), global_batch=7, **about)  # without workers, never left
    epochs = [list(loader) for _ in range(3)]

    again = instep.shard(DATA[kind](), global_batch=7, **about, **WORKERS[workers])
    for steps in (3, 1):  # the same loader: its workers may live on
        again.seek(1, 7 * steps)
        assert equal(list(again), epochs[1][steps:])
    assert equal(list(again), epochs[2])  # and the next epoch is whole


@pytest.mark.parametrize("workers", [0, 2])
def test_R1_a_resumed_epoch_goes_on(tmp_path: Any, workers: int) -> None:
    def read(file: Path, at: tuple[int, int] | None, steps: int | None) -> list[Any]:
        """The batches of epochs 1 and 2, or of the first `steps` steps."""
        data = Logged(64, file / str(instep.rank()))
        loader = instep.shard(data, 4, shuffle=True, num_workers=workers)
        loader.seek(*(at or (1, 0)))
        seen = [list(islice(loader, steps))] if steps else [list(loader), list(loader)]
        return [[(i.tolist(), x.tolist()) for i, x in batches] for batches in seen]

    for name in ("whole", "stopped", "resumed"):
        (tmp_path / name).mkdir()
    whole = run_ranks(read, 2, tmp_path / "whole", None, None)
    stopped = run_ranks(read, 2, tmp_path / "stopped", None, 3)
    resumed = run_ranks(read, 2, tmp_path / "resumed", (1, 3 * 8), None)

    for rank in range(2):
        assert stopped[rank][0] + resumed[rank][0] == whole[rank][0]
        assert resumed[rank][1] == whole[rank][1]
        fetched = Logged(64, tmp_path / "resumed" / str(rank)).fetched()
        assert fetched == Counter(i for epoch in resumed[rank] for index, _ in epoch for i in index)


def steps_of(make: Callable[[int, int], Any], world_size: int, at: int = 0) -> list[Counter[int]]:
    """What all ranks together see at each step of epoch 2, from a position on."""
    seen = []
    for rank in range(world_size):
        loader = make(rank, world_size)
        loader.seek(2, at)
        seen.append(epoch(loader))
    return [Counter(flat([b for mine in seen for b in mine[k : k + 1]])) for k in range(max(map(len, seen)))]


@pytest.mark.parametrize("kind", ["map-style", "stream"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_R6_another_number_of_ranks_sees_the_same_samples(kind: str, drop_last: bool) -> None:
    def make(rank: int, world_size: int) -> Any:
        data: Any = ShuffledStream(150) if kind == "stream" else Numbers(150)
        shuffle = None if kind == "stream" else True
        return instep.shard(
            data, global_batch=16, shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size
        )

    four = steps_of(make, 4)
    assert len(sum(four, Counter())) == (144 if drop_last else 150)
    for world_size in (2, 1, 3):
        assert steps_of(make, world_size, at=5 * 16) == four[5:]


def test_16_over_3_ranks() -> None:
    loaders = ranks(Numbers(40), 3, global_batch=16)

    assert [[len(batch) for batch in epoch(loader)] for loader in loaders] == [[6, 6, 3], [5, 5, 3], [5, 5, 2]]
    assert loaders[0].counts() == (15, 13, 12)
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    assert [loader.batch_size for loader in loaders] == [6, 5, 5]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_any_position_with_any_sampler_and_batch(kind: str) -> None:
    order = flat(epoch(instep.shard(loader_over(SAMPLERS[kind](), 10, 1), rank=0, world_size=1)))
    for at in range(len(order) + 1):
        for loader in ranks(loader_over(SAMPLERS[kind](), 10, 2), 2):
            loader.seek(0, at)
            rest = order[at:]
            assert epoch(loader) == [b for k in range(0, len(rest), 4) if (b := rest[k : k + 4][loader.rank :: 2])]


def test_a_position_counts_the_batches_of_a_batch_sampler() -> None:
    data = DataLoader(Numbers(10), batch_sampler=Pairs(10))
    batches = epoch(instep.shard(data, rank=0, world_size=1))

    for loader in ranks(data, 2):
        loader.seek(0, 3)
        assert epoch(loader) == batches[3:][loader.rank :: 2]
        assert (loader.units, loader.block, loader.size_at(3), loader.size_at(len(batches) - 1)) == (7, 2, 2, 1)


def test_endless_samplers_and_single_samples() -> None:
    endless = DataLoader(Numbers(100), batch_size=6, sampler=Endless(100))
    whole = [b.tolist() for b in islice(instep.shard(endless, rank=0, world_size=1), 300)]
    again = instep.shard(endless, rank=0, world_size=1)
    again.seek(0, 6 * 290)
    assert [b.tolist() for b in islice(again, 10)] == whole[290:]

    single = DataLoader(Augmented(7), batch_size=None, sampler=RandomSampler(range(7)))
    one, two = (instep.shard(single, rank=1, world_size=2) for _ in range(2))
    two.seek(0, 2)
    assert equal(list(two), list(one)[1:])


@pytest.mark.parametrize("workers", WORKERS)
def test_already_sharded_data_are_resumed_too(workers: str) -> None:
    class Own(WorkerStream):
        def __iter__(self) -> Iterator[Any]:
            return ((i, torch.rand(()).item()) for i in super().__iter__())

    for data in (Own(23), Augmented(23)):
        about: dict[str, Any] = {"rank": 1, "world_size": 2, "already_sharded": True, **WORKERS[workers]}
        whole = list(instep.shard(data, 4, **about))
        again = instep.shard(data, 4, **about)
        again.seek(0, 12)
        assert equal(list(again), whole[3:])
        assert len(list(again)) == len(whole)


def test_the_arithmetic_of_positions() -> None:
    loaders = ranks(Numbers(40), 3, global_batch=16, drop_last=False)

    for loader in loaders:
        at, sizes = 0, []
        while size := loader.size_at(at):
            assert size == sum(loader.count_at(at, rank) for rank in range(3))
            sizes.append(loader.count_at(at))
            at += size
        assert (at, loader.units, loader.block) == (40, 40, 16)
        assert sizes == [len(batch) for batch in epoch(loader)]
    short = instep.shard(Numbers(40), global_batch=16, drop_last=True, rank=0, world_size=3)
    assert (short.units, short.size_at(16), short.size_at(32), short.size_at(25)) == (32, 16, 0, 0)
    assert instep.shard(Stream(3), 2, rank=0, world_size=1).units is None
    halved = instep.shard(Numbers(5), global_batch=7, rank=1, world_size=2, already_sharded=True)
    assert (halved.batch_size, halved.block, halved.count_at(0)) == (3, 3, 3)  # this rank's part of 7, of its own data
    own = instep.shard(Numbers(5), 4, rank=1, world_size=2, already_sharded=True)
    assert (own.shared, own.units, own.block, own.count_at(4), own.count_at(4, 1)) == (False, 5, 4, 1, 1)
    with pytest.raises(instep.data.LengthUnknownError, match="other ranks"):
        own.size_at(0)
    with pytest.raises(instep.data.LengthUnknownError, match="other ranks"):
        own.count_at(0, 0)


def test_the_end_of_an_epoch_is_a_position() -> None:
    loader = instep.shard(Numbers(8), 4, rank=0, world_size=1)
    loader.seek(3, 8)

    assert epoch(loader) == []
    assert (loader.epoch, loader.start) == (4, 0)
    assert epoch(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("data", "position", "text"),
    [
        (Numbers(8), 9, "beyond the end"),
        (SizedStream(8), 9, "an epoch has 8"),
        (Numbers(8), -1, "position=-1"),
        (Numbers(8), 1.5, "position=1.5"),
    ],
)
def test_no_such_position(data: Any, position: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        instep.shard(data, 2, rank=0, world_size=1).seek(0, position)


def test_a_stream_of_its_own_is_begun_at_its_batches() -> None:
    loader = instep.shard(Stream(8), 4, rank=0, world_size=2, already_sharded=True)

    with pytest.raises(DataError, match="multiple of 4"):
        loader.seek(0, 6)
