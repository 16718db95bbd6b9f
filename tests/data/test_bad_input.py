"""Bad input: one clear error that says what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SubsetRandomSampler

import instep
from instep.errors import DataError
from tests.data.cases import Numbers, SizedStream, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(8), **{"batch_size": 4, **options})


DISTRIBUTED: Any = DistributedSampler(Numbers(8), num_replicas=2, rank=0)


class Around:
    """A batch sampler around a sampler that divides."""

    def __init__(self) -> None:
        self.sampler = DISTRIBUTED

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        yield list(self.sampler)


shard: Any = instep.shard  # also for what the types forbid

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: instep.shard([], 2), "no samples"),
    "empty stream": (lambda: instep.shard(SizedStream(0), 2), "no samples"),
    "empty loader": (lambda: instep.shard(DataLoader(Numbers(0))), "no samples"),
    "empty sampler": (lambda: instep.shard(loader(sampler=SubsetRandomSampler([]))), "no samples"),
    "batch 0": (lambda: instep.shard([1], 0), "at least 1"),
    "batch -1": (lambda: instep.shard([1], -1), "batch_size=-1"),
    "batch 2.0": (lambda: shard([1], 2.0), "batch_size=2.0"),
    "batch '4'": (lambda: shard([1], "4"), "batch_size='4'"),
    "batch True": (lambda: instep.shard([1], True), "batch_size=True"),
    "batch missing": (lambda: instep.shard([1]), "batch_size=32"),
    "batch missing for a stream": (lambda: instep.shard(Stream(3)), "batch_size=32"),
    "batch said twice": (lambda: instep.shard([1], 1, global_batch=2), "batch_size=1, global_batch=2"),
    "global batch and loader": (lambda: instep.shard(loader(), global_batch=8), "loader's batch_size is 4"),
    "global batch and batch sampler": (
        lambda: instep.shard(Numbers(8), global_batch=8, batch_sampler=[[0, 1]]),
        "mutually exclusive",
    ),
    "global batch 0": (lambda: instep.shard([1], global_batch=0), "global_batch=0"),
    "global batch '4'": (lambda: shard([1], global_batch="4"), "global_batch='4'"),
    "less than a sample per rank": (
        lambda: instep.shard([1], global_batch=2, rank=0, world_size=3),
        "global_batch=3 or more",
    ),
    "no data": (lambda: instep.shard(7, 2), "neither a dataset nor a DataLoader"),
    "a generator": (lambda: instep.shard((i for i in range(3)), 2), "IterableDataset"),
    "None": (lambda: instep.shard(None, 2), "NoneType"),
    "two batch sizes": (lambda: instep.shard(loader(), 8), "another batch size"),
    "batch size and batch sampler": (
        lambda: instep.shard(DataLoader(Numbers(8), batch_sampler=[[0, 1]]), 2),
        "another batch size",
    ),
    "shuffled stream": (lambda: instep.shard(Stream(3), 2, shuffle=True), "shuffle in its __iter__"),
    "shuffle and sampler": (
        lambda: instep.shard(loader(sampler=RandomSampler([1])), shuffle=False),
        "order of its own",
    ),
    "shuffle and loader": (lambda: instep.shard(loader(), shuffle=True), r"DataLoader\(..., shuffle=True\)"),
    "shuffle and own sampler": (lambda: instep.shard([1], 1, shuffle=True, sampler=[0]), "mutually exclusive"),
    "rank outside": (lambda: instep.shard([1], 1, rank=2, world_size=2), "the last one here is 1"),
    "rank -1": (lambda: instep.shard([1], 1, rank=-1, world_size=2), "rank=-1"),
    "rank 'x'": (lambda: shard([1], 1, rank="x", world_size=2), "rank='x'"),
    "world 0": (lambda: instep.shard([1], 1, rank=0, world_size=0), "world_size=0"),
    "seed 'x'": (lambda: shard([1], 1, seed="x"), "seed='x'"),
    "no length": (lambda: instep.shard(Endless(), 2), "__len__"),
    "no length in a loader": (lambda: instep.shard(DataLoader(Endless(), batch_size=2)), "__len__"),
    "sharded": (lambda: instep.shard(loader(sampler=DISTRIBUTED)), "wrong: .*\n.*right: .*shuffle=True"),
    "sharded inside": (lambda: instep.shard(DataLoader(Numbers(8), batch_sampler=Around())), "DistributedSampler"),
    "sharded twice": (lambda: instep.shard(instep.shard([1], 1, rank=0, world_size=1)), "already"),
    "an iterator as sampler": (lambda: instep.shard(loader(sampler=iter([0, 1]))), "second epoch"),
    "options for a loader": (lambda: instep.shard(loader(), num_workers=2), "num_workers=2"),
    "unknown option": (lambda: instep.shard([1], 1, num_worker=2), "num_worker"),
    "impossible option": (lambda: instep.shard([1], 1, num_workers=-1), "non-negative"),
    "a loader of another kind": (lambda: instep.shard(OwnLoader(Numbers(8))), "loader.dataset"),
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.comm.rank", lambda: 0, raising=False)
    monkeypatch.setattr("instep.comm.world_size", lambda: 1, raising=False)


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, text = BAD[case]

    with pytest.raises(DataError) as caught:
        call()
    assert caught.value.evidence
    assert caught.value.cure
    assert caught.match(f"(?s){text}")


@pytest.mark.parametrize("step", [-1, 2])
def test_no_such_step(step: int) -> None:
    with pytest.raises(DataError, match="steps=2"):
        instep.shard(Numbers(8), 2, rank=0, world_size=2).global_batch_size(step)


def test_defaults_come_from_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.comm.rank", lambda: 1)
    monkeypatch.setattr("instep.comm.world_size", lambda: 3)

    assert [b.tolist() for b in instep.shard(torch.arange(7), 2)] == [[1, 4]]
    assert repr(instep.shard([1, 2], 2)) == "ShardedLoader(list, rank 1 of 3, batch_size=2)"


def test_a_distributed_loader_may_pass_through() -> None:
    loaded = instep.shard(loader(sampler=DISTRIBUTED), rank=0, world_size=2, already_sharded=True)

    assert sorted(i for batch in loaded for i in batch.tolist()) == sorted(DISTRIBUTED)
    assert DISTRIBUTED.epoch == 0
