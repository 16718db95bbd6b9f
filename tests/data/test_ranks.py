"""With real ranks: the place in the world is found, and nobody waits for anybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import instep
from tests.harness import run_ranks


def read(size: int, workers: int) -> tuple[list[int], int]:
    loader = instep.shard(TensorDataset(torch.arange(size)), 2, shuffle=True, num_workers=workers)
    seen = [i for (batch,) in loader for i in batch.tolist()]
    return seen, instep.total(len(seen))


@pytest.mark.parametrize(("size", "workers"), [(13, 0), (2, 0), (13, 2)])
def test_each_sample_is_read_once(size: int, workers: int) -> None:
    answers = run_ranks(read, 3, size, workers, limit_s=60)

    assert sorted(i for seen, _ in answers for i in seen) == list(range(size))
    assert [total for _, total in answers] == [size] * 3


def exact_mean() -> tuple[float, int]:
    """Evaluation with 13 draws of 10 samples, each with its own value."""
    values = torch.arange(10.0)
    data: Any = DataLoader(
        TensorDataset(values), batch_size=2, sampler=WeightedRandomSampler((values + 1).tolist(), 13)
    )
    drawn = torch.cat([batch for (batch,) in instep.shard(data)] or [torch.empty(0)])
    return instep.mean(drawn.mean(), len(drawn)), instep.total(len(drawn))


def test_a_mean_over_the_shards_is_the_mean_over_one_process() -> None:
    alone = run_ranks(exact_mean, 1)[0]

    assert alone[1] == 13
    for mean, count in run_ranks(exact_mean, 4, limit_s=60):
        assert mean == pytest.approx(alone[0], abs=1e-6)
        assert count == 13
