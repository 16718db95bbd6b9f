"""Every strategy gives what one process gives on the concatenated batches: accumulation, partial window, clipping."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.train.strategies.cases import OPTIMIZERS, Training, alone, blocks, difference

CASES = [(name, accumulate) for name in OPTIMIZERS for accumulate in (1, 3)]


@functools.cache
def trained(strategy: str, ranks: int) -> dict[tuple[str, int], list[Any]]:
    """All cases in one job: (main rank's weights, norms) by case, for each rank."""

    def work() -> dict[tuple[str, int], Any]:
        results = {}
        for name, accumulate in CASES:
            training = Training(blocks(strategy), OPTIMIZERS[name]).run(accumulate)
            results[name, accumulate] = training.weights(), training.norms
        return results

    nodes = [2, 2] if strategy == "hsdp" and ranks == 4 else None
    everyone = run_ranks(work, ranks, nodes=nodes)
    return {case: [results[case] for results in everyone] for case in CASES}


@pytest.mark.parametrize(("name", "accumulate"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "hsdp"])
def test_equal_to_one_process(strategy: str, ranks: int, name: str, accumulate: int) -> None:
    if ranks == 1 and strategy != "ddp":
        pytest.skip("all the same in a world of one")
    results = trained(strategy, ranks)[name, accumulate]
    weights, norms = alone(OPTIMIZERS[name], accumulate, ranks)
    assert difference(results[0][0], weights) < 1e-6
    for rank in range(ranks):
        assert results[rank][1] == pytest.approx(norms, rel=1e-5)
        assert results[rank][1] == results[0][1], "norms differ between ranks"
        assert rank == 0 or results[rank][0] == {}
