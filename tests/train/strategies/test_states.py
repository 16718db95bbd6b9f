"""States through a checkpoint of torch.distributed.checkpoint, to another strategy at another world size."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from instep.errors import TrainError
from instep.train.strategies.states import load_optimizer_state, optimizer_state
from tests.harness import run_ranks
from tests.train.strategies.cases import OPTIMIZERS, Training, adamw, blocks, difference, network, possible, windows

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL = 4  # ranks whose batches a step takes; with fewer ranks, each takes those of several in turn


def steps(training: Training, first: int, last: int) -> Training:
    """Steps of the same global batch at every world size."""
    for window in list(windows(1, GLOBAL, 4))[first:last]:
        here = training.session.world_size
        turns = [window[0][turn * here : (turn + 1) * here] for turn in range(GLOBAL // here)]
        training.window(turns)
    return training


def uninterrupted(name: str) -> dict[str, torch.Tensor]:
    return steps(Training("ddp", OPTIMIZERS[name]), 0, 4).weights()


def save(folder: Path, strategy: str, name: str, count: int = 2) -> dict[str, torch.Tensor]:
    training = steps(Training(blocks(strategy), OPTIMIZERS[name]), 0, count)
    training.optimizer.param_groups[0]["lr"] *= 0.5  # as a schedule would have done
    dcp.save(training.strategy.state(training.wrapped, training.optimizer), checkpoint_id=folder)
    return training.weights()


def go_on(folder: Path, strategy: str, name: str, count: int = 2) -> tuple[dict[str, torch.Tensor], float]:
    training = Training(blocks(strategy), OPTIMIZERS[name])
    state = training.strategy.state(training.wrapped, training.optimizer)
    dcp.load(state, checkpoint_id=folder)
    training.strategy.load_state(training.wrapped, training.optimizer, state)
    rate = training.optimizer.param_groups[0]["lr"]
    for group in training.optimizer.param_groups:
        group["lr"] = 2 * rate
    return steps(training, count, 4).weights(), rate


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_R19_saved_by_one_strategy_and_gone_on_with_by_others(name: str, tmp_path: Path) -> None:
    expected = uninterrupted(name)
    rate = OPTIMIZERS[name](network().parameters()).param_groups[0]["lr"] / 2
    savers = possible("ddp", "zero1", "fsdp")

    def saving() -> None:
        for saver in savers:
            save(tmp_path / saver, saver, name)

    def loading(loaders: list[str]) -> list[tuple[str, str, dict[str, torch.Tensor], float]]:
        return [(saver, loader, *go_on(tmp_path / saver, loader, name)) for saver in savers for loader in loaders]

    run_ranks(saving, 2, limit_s=120)
    results = loading(["ddp"]) + run_ranks(loading, 4, possible("zero1", "fsdp"), limit_s=120)[0]
    for saver, loader, weights, got in results:
        assert got == pytest.approx(rate), (saver, loader)
        assert difference(weights, expected) < 1e-6, (saver, loader)


def test_R19_a_state_saved_by_the_main_rank_alone_hangs_nobody(tmp_path: Path) -> None:
    def work() -> list[str]:
        training = steps(Training("zero1"), 0, 2)
        state = training.strategy.state(training.wrapped, training.optimizer)  # on all ranks
        weights = training.weights()
        if training.session.is_main:
            torch.save((state, weights), tmp_path / "state.pt")
        return sorted(state["optimizer"]["state"])

    parts = run_ranks(work, 2, limit_s=120)
    names = sorted(network().state_dict())
    assert sorted(parts[0] + parts[1]) == names  # each rank gave what it owns
    state, weights = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["optimizer"]["groups"][0]["params"] == list(network().state_dict())
    training = Training("ddp")
    training.model.load_state_dict(weights)
    assert difference(training.weights(), weights) == 0


def test_zero1_with_more_ranks_than_parameters_and_a_state_before_the_first_step(tmp_path: Path) -> None:
    def work() -> dict[str, torch.Tensor]:
        training = Training("zero1", model=nn.Linear(6, 3))
        state = training.strategy.state(training.wrapped, training.optimizer)
        assert not state["optimizer"]["begun"]
        dcp.save(state, checkpoint_id=tmp_path)
        other = Training("zero1", model=nn.Linear(6, 3))
        state = other.strategy.state(other.wrapped, other.optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        other.strategy.load_state(other.wrapped, other.optimizer, state)
        one, two = steps(training, 0, 2).weights(), steps(other, 0, 2).weights()
        assert not one or difference(one, two) == 0
        return one

    assert run_ranks(work, 4, limit_s=120)[0]


def test_zero1_keeps_groups_and_options() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.5}, {"params": others, "weight_decay": 0.25}]
        return torch.optim.AdamW(groups, lr=0.125, betas=(0.8, 0.9))

    def work() -> list[dict[str, Any]]:
        optimizer = Training("zero1", make).optimizer
        return [{key: group[key] for key in ("lr", "weight_decay", "betas")} for group in optimizer.param_groups]

    for groups in run_ranks(work, 2, limit_s=120):
        assert groups == [
            {"lr": 0.5, "weight_decay": 0.01, "betas": (0.8, 0.9)},
            {"lr": 0.125, "weight_decay": 0.25, "betas": (0.8, 0.9)},
        ]


@pytest.mark.parametrize("name", ["adamw", "momentum", "decayed", "nadam"])
def test_asking_for_the_state_before_the_first_step_changes_nothing(name: str) -> None:
    makers: dict[str, Any] = {
        **OPTIMIZERS,
        "decayed": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1, dampening=0.5),
        "nadam": torch.optim.NAdam,
    }

    def train(ask: bool) -> dict[str, torch.Tensor]:
        training = Training("ddp", makers[name])
        if ask:
            state = copy.deepcopy(training.strategy.state(training.wrapped, training.optimizer))
            training.strategy.load_state(training.wrapped, training.optimizer, state)
        return training.run(steps=3).weights()

    assert difference(train(True), train(False)) == 0


def test_parameters_grouped_in_another_way() -> None:
    model = network()
    one = torch.optim.SGD(model.parameters())
    first, *others = model.parameters()
    other = torch.optim.SGD([{"params": others}, {"params": [first]}], lr=0.5)
    with pytest.raises(TrainError, match="grouped in another way"):
        load_optimizer_state(model, one, optimizer_state(model, other))


@pytest.mark.parametrize("strategy", possible("zero1", "fsdp"))
def test_an_optimizer_that_has_stepped_is_refused(strategy: str) -> None:
    def work() -> None:
        model = network()
        optimizer = adamw(model.parameters())
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        with pytest.raises(TrainError, match="has stepped already"):
            Training(strategy, lambda _: optimizer, model=model)

    run_ranks(work, 2, limit_s=120)
