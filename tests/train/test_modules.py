"""SyncBatchNorm, recomputing and compiling: the same numbers, the same names, and copies that are copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from instep.comm.session import current
from instep.errors import TrainError
from instep.train.modules import transform
from instep.train.strategies import Single
from tests.harness import run_ranks
from tests.train.strategies.cases import Training, adamw, alone, blocks, difference, network, possible


class Counting(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.inner(x))


def test_recomputing_runs_forward_again_and_keeps_names_and_copies() -> None:
    block = Counting()
    model = nn.Sequential(block, nn.Linear(4, 1))
    names = list(model.state_dict())
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))

    transform(model, Single(), current("the test"), recompute=[Counting])
    block.calls = 0
    gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert block.calls == 2
    assert all(map(torch.equal, gradients, expected))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    with torch.no_grad():
        model(x)
    assert block.calls == 3

    twin = copy.deepcopy(block)
    nn.init.zeros_(twin.inner.weight)
    nn.init.zeros_(twin.inner.bias)
    assert torch.equal(twin(x), torch.zeros(3, 4))
    assert not torch.equal(block(x), torch.zeros(3, 4))


def test_nothing_to_recompute() -> None:
    with pytest.raises(TrainError, match="no Conv2d or LSTM to recompute"):
        transform(network(), Single(), current("the test"), recompute=[nn.Conv2d, nn.LSTM])


def test_sync_batchnorm_on_the_cpu_is_refused_at_once() -> None:
    def work() -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        session = current("the test")
        assert transform(network(), Single(), session, sync_batchnorm=True) is not None  # has none: nothing to do
        with pytest.raises(TrainError, match="SyncBatchNorm needs CUDA") as caught:
            transform(model, Single(), session, sync_batchnorm=True)
        return str(caught.value)

    assert "GroupNorm" in run_ranks(work, 2, limit_s=90)[0]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert transform(model, Single(), current("the test"), sync_batchnorm=True) is model  # alone, it is the same


def test_recomputed_compiled_and_shared_is_equal_to_one_process() -> None:
    def work() -> list[tuple[float, int]]:
        def backend(graph: Any, _examples: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        results = []
        for name in possible("ddp", "fsdp"):
            graphs: list[Any] = []
            model = network()
            names = list(model.state_dict())
            options = {"recompute": [nn.Sequential], "compile": {"backend": backend}}
            training = Training(blocks(name), model=model, transform=options).run(accumulate=2)
            weights = training.weights()
            assert list(training.model.state_dict()) == names
            if weights:
                results.append((difference(weights, alone(adamw, 2, 2)[0]), len(graphs)))
        return results

    for far, graphs in run_ranks(work, 2, limit_s=200)[0]:
        assert far < 1e-6
        assert graphs > 0


def test_compiled_model_can_be_copied() -> None:
    model = network()
    transform(model, Single(), current("the test"), compile={"backend": "eager"})
    x = torch.randn(2, 6)
    assert torch.allclose(copy.deepcopy(model)(x), model(x))
    assert list(model.state_dict()) == list(network().state_dict())
