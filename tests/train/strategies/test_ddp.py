"""DDP against one process, its hooks, and what it says of parameters that get no gradient."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tests.train.strategies.cases import OPTIMIZERS, Training, alone, difference


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_equal_to_one_process(name: str, accumulate: int, ranks: int):
    def work():
        training = Training("ddp", OPTIMIZERS[name]).run(accumulate)
        return training.weights(), training.norms

    results = run_ranks(work, ranks)
    weights, norms = alone(OPTIMIZERS[name], accumulate, ranks)
    assert difference(results[0][0], weights) < 1e-6
    for rank in range(ranks):
        assert results[rank][1] == pytest.approx(norms, rel=1e-5)
        assert results[rank][1] == results[0][1]
        assert rank == 0 or results[rank][0] == {}
