"""What the engines cannot do, and what they would wait for, is said before or at the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import TrainError
from instep.train.strategies import DDP, FSDP, HSDP, Strategy, Zero1, resolve
from tests.harness import run_ranks
from tests.train.strategies.cases import CLIP, SHARDS_ON_CPU, Training, adamw, alone, difference, momentum, windows
from tests.train.strategies.test_equal import address_of_this_machine


class Branching(nn.Module):
    """Uses its second half only when told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) + self.frozen(x)
        return y + self.second(x) if self.both else y


def test_resolve() -> None:
    assert [resolve(name, 2).name for name in ("ddp", "zero1", "fsdp", "hsdp")] == ["ddp", "zero1", "fsdp", "hsdp"]
    assert resolve("fsdp", 1).name == "single"
    assert not resolve(FSDP(), 1).collective_forward
    mine = DDP(bucket_mb=1)
    assert resolve(mine, 2) is mine
    with pytest.raises(TrainError, match="no strategy 'ddp2'") as caught:
        resolve("ddp2", 2)
    assert "'hsdp'" in str(caught.value)


def test_unused_parameters_are_named() -> None:
    def work() -> tuple[str, str]:
        training = Training("ddp", model=Branching())
        window = next(windows(1, 2))
        x, y = window[0][training.session.rank]
        nn.functional.cross_entropy(training.wrapped(x), y).backward()
        assert training.strategy.unused(training.model) == ["second.weight", "second.bias"]
        with pytest.raises(TrainError) as first:
            training.strategy.refuse_unused(training.model)
        with pytest.raises(RuntimeError) as later:
            training.wrapped(x)
        explained = training.strategy.explain(later.value, training.model)
        other = ValueError("something else")
        assert training.strategy.explain(other, training.model) is other
        return str(first.value), str(explained)

    for first, later in run_ranks(work, 2, limit_s=120):
        assert first == later
        assert "2 parameters got no gradient" in first
        assert "second.weight\n  second.bias\n" in first
        assert "find_unused_parameters=True" in first


def test_find_unused_parameters_trains_what_is_used() -> None:
    def work() -> dict[str, Tensor]:
        training = Training(DDP(find_unused_parameters=True), momentum, model=Branching())
        for number, window in enumerate(windows(2, 2)):
            training.model.both = number % 2 == 1  # type: ignore[assignment]  # not a module
            training.window(window)
            training.strategy.refuse_unused(training.model)
        return training.weights()

    def one_process() -> dict[str, Tensor]:
        model = Branching()
        optimizer = momentum(model.parameters())
        for number, window in enumerate(windows(2, 2)):
            model.both = number % 2 == 1
            x, y = (torch.cat([pair[part] for ranks in window for pair in ranks]) for part in (0, 1))
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    assert difference(run_ranks(work, 2, limit_s=120)[0], one_process()) < 1e-6


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("powersgd", 0.1)])
def test_hooks_are_near_one_process(hook: Any, tolerance: float) -> None:
    def work() -> dict[str, Tensor]:
        return Training(DDP(comm_hook=hook, powersgd_rank=2, powersgd_start=2), momentum).run(accumulate=2).weights()

    far = difference(run_ranks(work, 2, limit_s=120)[0], alone(momentum, 2, 2)[0])
    assert 1e-8 < far < tolerance  # of steps of up to 0.05


def refusals() -> list[tuple[Strategy, str]]:
    sharding = [
        (HSDP(shard_ranks=2), "3 ranks cannot be divided into groups of 2"),
        (HSDP(), "nodes have different numbers of ranks"),
        (FSDP(blocks=[nn.Conv2d]), "no Conv2d to make blocks of"),
        (FSDP(offload=True), "where they already are"),
    ]
    return [
        (DDP(comm_hook="bf16"), "gloo cannot sum bf16 gradients: the hook comm_hook='bf16' needs NCCL"),
        (Zero1(comm_hook="bf16"), "gloo cannot sum bf16"),
        (DDP(comm_hook="fp8"), "no communication hook 'fp8'"),  # type: ignore[arg-type]
        (DDP(comm_hook="powersgd", powersgd_start=1), "powersgd_start=1"),
        *(sharding if SHARDS_ON_CPU else [(one, "needs a newer torch on the CPU") for one, _ in sharding]),
    ]


def test_what_cannot_be_done_is_refused_before_training() -> None:
    def work() -> list[str]:
        said = []
        for strategy, _ in refusals():
            with pytest.raises(TrainError) as caught:
                Training(strategy)
            said.append(str(caught.value))
        with pytest.raises(TrainError, match="nothing to train"):
            Training("ddp", momentum, model=nn.Linear(6, 3).requires_grad_(False))
        with pytest.raises(TrainError, match="does not go together with accumulation"):
            Training(DDP(static_graph=True)).run(accumulate=2)
        with pytest.raises(TrainError, match="makes its states when it is made" if SHARDS_ON_CPU else "newer torch"):
            Training("fsdp", torch.optim.Adagrad)
        return said

    there = {"MASTER_ADDR": address_of_this_machine()}
    for said in run_ranks(work, 3, nodes=[2, 1], env=there, limit_s=120):
        for text, (_, expected) in zip(said, refusals(), strict=True):
            assert expected in text


def test_static_graph_frozen_and_uneven_groups() -> None:
    def work() -> tuple[dict[str, Tensor], ...]:
        static = Training(DDP(static_graph=True, gradient_as_bucket_view=False, broadcast_buffers=False)).run()
        zero = Training(Zero1(parameters_as_bucket_view=False), instance=False, fused=False).run(accumulate=3)
        if not SHARDS_ON_CPU:
            return static.weights(), zero.weights()
        made = Training(FSDP(reshard_after_forward=False), instance=False).run(accumulate=3)
        shared = Training(HSDP(shard_ranks=2)).run(accumulate=3)
        return static.weights(), zero.weights(), made.weights(), shared.weights()

    results = run_ranks(work, 4, limit_s=120)[0]
    for weights, accumulate in zip(results, (1, 3, 3, 3), strict=False):
        assert difference(weights, alone(adamw, accumulate, 4)[0]) < 1e-6
