"""Half precision beside float32, one unscaling a step, steps skipped on all ranks, the finite check, fused kernels."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from instep.errors import TrainError
from instep.train.optimizers import build, fuse
from instep.train.precision import Precision
from instep.train.strategies import Single
from tests.harness import run_ranks
from tests.train.strategies.cases import (
    OPTIMIZERS,
    STEPS,
    Training,
    adamw,
    alone,
    blocks,
    difference,
    momentum,
    network,
    possible,
    windows,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
INF = float("inf")


def test_unknown_precision() -> None:
    with pytest.raises(TrainError, match="'fp32', 'bf16', 'fp16'"):
        Precision("fp8", CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_float32(precision: str) -> None:
    weights, _ = alone(momentum, 2, 1)
    training = Training("ddp", momentum, precision=precision).run(accumulate=2)
    far = difference(training.weights(), weights)
    assert 1e-7 < far < 5e-3  # of weights of up to 0.4: rounding to 8 or 11 bits, five times
    assert all(one.dtype == torch.float32 for one in training.parameters)
    assert training.skipped == [0] * STEPS


class TestR10:
    """Accumulation, clipping and the scaler: once per step each, whatever the micro-batches."""

    @pytest.mark.parametrize("strategy", possible("ddp", "zero1", "fsdp"))
    def test_R10_unscale_once_and_reduce_once_per_step(self, strategy: str) -> None:
        def work() -> tuple[dict[str, torch.Tensor], list[float], int, int]:
            def unscale(optimizer: torch.optim.Optimizer) -> None:
                unscaled.append(1)
                inner(optimizer)

            training = Training(blocks(strategy), precision="fp16")
            unscaled: list[int] = []
            reduced: list[int] = []
            scaler: Any = training.precision._scaler
            inner, scaler.unscale_ = scaler.unscale_, unscale
            if strategy != "fsdp":  # whose gradients are reduced in another way
                wrapped: Any = training.wrapped
                wrapped.register_comm_hook(reduced, counting_hook())
            training.run(accumulate=4, steps=3)
            again = training.parameters, training.optimizer, training.strategy
            training.precision.unscale_and_check(*again)
            with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
                training.precision.unscale_and_check(*again)
            return training.weights(), training.norms, len(unscaled) - 2, len(reduced)

        weights, norms = alone(adamw, 4, 2, steps=3)
        for got, got_norms, unscaled, reduced in run_ranks(work, 2, limit_s=120):
            assert unscaled == 3
            assert reduced == (3 if strategy != "fsdp" else 0)
            assert got_norms == pytest.approx(norms, rel=0.05)
            assert not got or difference(got, weights) < 5e-2

    @pytest.mark.parametrize("precision", ["fp16", "fp32"])
    def test_R10_an_overflow_on_one_rank_skips_the_step_on_all(self, precision: str) -> None:
        def work() -> list[Any]:
            results = []
            for strategy in possible("ddp", "zero1", "fsdp"):
                training = Training(blocks(strategy), precision=precision)
                for number, window in enumerate(windows(2, 2)):
                    before = training.weights()
                    scale = training.precision.get_scale()
                    bad = number == 2 and training.session.rank == 1
                    training.window(window, poison=INF if bad else 1.0)
                    stayed = all(torch.equal(one, before[name]) for name, one in training.weights().items())
                    assert stayed == (number == 2) or not before
                    smaller = training.precision.get_scale() < scale
                    assert smaller == (number == 2 and precision == "fp16")
                results.append((strategy, training.skipped))
            return results

        for results in run_ranks(work, 2, limit_s=120):
            for strategy, skipped in results:
                assert skipped == [0, 0, 1, 0, 0], strategy


def counting_hook() -> Any:
    """DDP's own way of averaging, which notes each bucket in its state."""
    from torch.distributed import distributed_c10d
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(counts, bucket):  # type: ignore[no-untyped-def]  # torch wants its own annotations, not their names
        counts.append(bucket.index())
        return allreduce_hook(distributed_c10d._get_default_group(), bucket)

    return hook


def test_state_of_the_scale() -> None:
    training = Training("ddp", precision="fp16")
    training.window(next(windows(1, 1)), poison=INF)
    state = training.precision.state_dict()
    assert state["scale"] == 32768.0
    other = Precision("fp16", CPU)
    other.load_state_dict(state)
    assert other.get_scale() == 32768.0
    assert Precision("bf16", CPU).state_dict() == {}
    Precision("bf16", CPU).load_state_dict(state)
    other.load_state_dict({})


class TestFinite:
    """The check by itself."""

    @pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_one_bad_value_among_many(self, dtype: torch.dtype, bad: float) -> None:
        parameters = [nn.Parameter(torch.zeros(5, 3, dtype=kind)) for kind in (torch.float32, dtype)]
        parameters.append(nn.Parameter(torch.zeros(2)))  # without a gradient
        for one in parameters[:2]:
            one.grad = torch.full_like(one, 1e30)
        optimizer = torch.optim.SGD(parameters)
        precision = Precision("fp32", CPU)
        assert precision.unscale_and_check(parameters, optimizer, Single()).item() == 0
        assert parameters[1].grad is not None
        parameters[1].grad[4, 2] = bad
        found = precision.unscale_and_check(parameters, optimizer, Single())
        assert found.item() == 1
        assert found.shape == ()
        precision.step(optimizer, found)
        assert parameters[0].abs().max() == 0

    def test_sparse_gradients(self) -> None:
        model = nn.Embedding(5, 3, sparse=True)
        parameters = list(model.parameters())
        optimizer = build(lambda parameters: torch.optim.SGD(parameters, lr=1.0), model)
        before = model.weight.detach().clone()
        precision = Precision("fp16", CPU)
        precision.scale(model(torch.tensor([1, 1, 3])).sum()).backward()
        found = precision.unscale_and_check(parameters, optimizer, Single())
        precision.step(optimizer, found)
        assert found.item() == 0
        assert torch.allclose(before - model.weight.detach(), torch.tensor([0.0, 2, 0, 1, 0])[:, None].expand(5, 3))
        optimizer.zero_grad()
        precision.update()
        (model(torch.tensor([2])).sum() * INF).backward()
        assert precision.unscale_and_check(parameters, optimizer, Single()).item() == 1


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


class TestFused:
    """Fused kernels: the same numbers but for rounding."""

    @pytest.mark.parametrize("name", list(MAKERS))
    def test_equal_over_twenty_steps(self, name: str) -> None:
        def train(fused: bool) -> torch.Tensor:
            model = network()
            optimizer = build(MAKERS[name], model, fused=fused)
            assert bool(optimizer.param_groups[0]["fused"]) == fused
            maker = torch.Generator().manual_seed(0)
            for _ in range(20):
                for one in model.parameters():
                    one.grad = torch.randn(one.shape, generator=maker)
                optimizer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        one, other = train(True), train(False)
        assert ((one - other).norm() / other.norm()).item() < 1e-6

    def test_a_parameter_that_gets_its_first_gradient_late(self) -> None:
        """Torch's fused SGD alone fails there, for want of a momentum buffer."""

        def train(fused: bool) -> torch.Tensor:
            model = network()
            optimizer = build(MAKERS["nesterov"], model, fused=fused)
            maker = torch.Generator().manual_seed(0)
            for number in range(6):
                for place, one in enumerate(model.parameters()):
                    gradient = torch.randn(one.shape, generator=maker)
                    one.grad = gradient if number >= place // 2 else None
                optimizer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        assert torch.allclose(train(True), train(False), atol=1e-7)

    def test_left_alone_where_the_user_chose(self) -> None:
        model = network()
        chosen = [
            torch.optim.AdamW(model.parameters(), foreach=True),
            torch.optim.AdamW(model.parameters(), foreach=False),
            torch.optim.AdamW(model.parameters(), fused=False),
            torch.optim.SGD(model.parameters(), differentiable=True),
            torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
            torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.1),
            torch.optim.RMSprop(model.parameters()),
            type("Mine", (torch.optim.AdamW,), {})(model.parameters()),
        ]
        for optimizer in chosen:
            before = copy.deepcopy(optimizer.state_dict())
            assert not fuse(optimizer, model.parameters())
            assert optimizer.state_dict() == before

    def test_optimizer_of_another_model(self) -> None:
        with pytest.raises(TrainError, match="8 parameters that are not the model's"):
            build(torch.optim.SGD(network().parameters()), network())

    def test_no_optimizer(self) -> None:
        with pytest.raises(TrainError, match="no optimizer: float"):
            build(0.1, network())  # type: ignore[arg-type]
