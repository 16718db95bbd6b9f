"""Every strategy gives what one process gives on the concatenated batches: accumulation, partial window, clipping."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from instep.comm import interfaces
from instep.world.meeting import is_loopback
from tests.harness import run_ranks
from tests.train.strategies.cases import OPTIMIZERS, Training, alone, blocks, difference, possible

CASES = [(name, accumulate) for name in OPTIMIZERS for accumulate in (1, 3)]
STRATEGIES = possible("ddp", "zero1", "fsdp", "hsdp")


@functools.cache
def trained(ranks: int) -> list[dict[tuple[str, str, int], Any]]:
    """All cases in one job: for each rank its (weights, norms) by strategy, optimizer and accumulation."""

    def work() -> dict[tuple[str, str, int], Any]:
        results = {}
        for strategy in STRATEGIES if ranks > 1 else STRATEGIES[:1]:
            for name, accumulate in CASES:
                training = Training(blocks(strategy), OPTIMIZERS[name]).run(accumulate)
                results[strategy, name, accumulate] = training.weights(), training.norms
        return results

    # On two nodes, hsdp has two copies of the model.
    there = {"MASTER_ADDR": address_of_this_machine()}
    return run_ranks(work, ranks, nodes=[2, 2] if ranks == 4 else None, env=there, limit_s=120)


@pytest.mark.parametrize(("name", "accumulate"), CASES)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), *((n, one) for n in (2, 4) for one in STRATEGIES)])
def test_equal_to_one_process(ranks: int, strategy: str, name: str, accumulate: int) -> None:
    results = [results[strategy, name, accumulate] for results in trained(ranks)]
    weights, norms = alone(OPTIMIZERS[name], accumulate, ranks)
    assert difference(results[0][0], weights) < 1e-6
    for rank in range(ranks):
        assert results[rank][1] == pytest.approx(norms, rel=1e-5)
        assert results[rank][1] == results[0][1], "norms differ between ranks"
        assert rank == 0 or results[rank][0] == {}


def address_of_this_machine() -> str:
    """One that is no loopback address: pretended nodes cannot meet on that."""
    found = [one for addresses in interfaces.here().values() for one in addresses]
    return next(one for one in found if not is_loopback(one) and ":" not in one)
