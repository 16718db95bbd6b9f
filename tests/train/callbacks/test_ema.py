"""The average of the weights: equal to one written by hand, on all ranks, and out of the model after an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import TrainError
from instep.train.callbacks import EMA, GradientStats
from instep.train.events import Callback, on
from tests.harness import run_ranks
from tests.train.callbacks.toy import data, mae, trainer

if TYPE_CHECKING:
    from pathlib import Path


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class ByHand(Callback):
    """The formula."""

    def __init__(self, decay: float, every: int) -> None:
        self.decay = decay
        self.every = every
        self.average: dict[str, Tensor] = {}

    def on_step_end(self, training: Any) -> None:
        for name, value in training.model.state_dict().items():
            if name not in self.average:
                self.average[name] = value.clone()
            elif value.is_floating_point():
                self.average[name] = self.decay * self.average[name] + (1 - self.decay) * value


@pytest.mark.parametrize(("nproc", "every"), [(1, 3), (2, 1)])
def test_it_is_the_formula_on_every_rank_and_bit_by_bit_the_same(nproc: int, every: int) -> None:
    def work() -> list[dict[str, Tensor]]:
        whole, bare, hand = EMA(0.9, every=every, buffers="average"), EMA(0.9, every=every), ByHand(0.9, every)
        trainer([whole, bare, hand], normed()).fit()
        return [whole.state_dict()["weights"], bare.state_dict()["weights"], hand.average]

    answers = run_ranks(work, nproc)
    for whole, bare, wanted in answers:
        assert whole.keys() == wanted.keys()
        assert sorted(bare) == sorted(name for name in whole if "running" not in name and "num_" not in name)
        for name in bare:
            assert torch.equal(bare[name], whole[name])
            assert torch.equal(bare[name], answers[0][1][name])
        for name in wanted:
            if wanted[name].is_floating_point():
                torch.testing.assert_close(whole[name], wanted[name])


def test_evaluation_is_of_the_average_and_the_weights_come_back() -> None:
    def fit(callbacks: list[Callback]) -> Any:
        training = trainer(callbacks, eval_data=data(), metrics={"mae": mae})
        training.fit()
        return training

    def work() -> None:
        ema = EMA(0.9)
        plain, training = fit([]), fit([ema])
        model = normed_like(ema.state_dict()["weights"])
        with torch.no_grad():
            by_hand = float(mae(model(data().tensors[0]), data().tensors[1]))
        assert training.results["mae"] == pytest.approx(by_hand, abs=1e-6)
        assert training.results["mae"] != pytest.approx(plain.results["mae"], abs=1e-3)
        untouched = plain.model.state_dict()
        assert all(torch.equal(value, untouched[name]) for name, value in training.model.state_dict().items())

    run_ranks(work, 2, limit_s=90)


def normed_like(weights: dict[str, Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model.load_state_dict(weights)
    return model


def test_the_weights_come_back_when_the_evaluation_fails() -> None:
    before: dict[str, Tensor] = {}

    @on("evaluate_start")
    def look(training: Any) -> None:
        before.update({name: value.clone() for name, value in training.model.state_dict().items()})

    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")

    training = trainer([look, EMA(0.9)], eval_data=data(), metrics={"bad": fail})
    with pytest.raises(ZeroDivisionError):
        training.fit()
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())


def test_a_block_with_the_average_in_the_model() -> None:
    ema = EMA(0.5)
    training = trainer([ema])
    training.fit()
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    average = {name: value.clone() for name, value in ema.state_dict()["weights"].items()}
    with ema.averaged(training):
        assert all(torch.equal(value, average[name]) for name, value in training.model.state_dict().items())
    assert all(torch.equal(value, weights[name]) for name, value in training.model.state_dict().items())


def test_before_the_first_average_the_weights_themselves_are_evaluated() -> None:
    kept: list[bool] = []
    ema = EMA(0.9, every=1000)

    @on("evaluate_end")
    def look(training: Any, results: dict[str, float]) -> None:
        x, y = data().tensors
        kept.append(results["mae"] == pytest.approx(float(mae(training.model(x), y)), abs=1e-6))

    trainer([ema, look], eval_data=data(), metrics={"mae": mae}).fit()
    assert kept == [True] * 3


def test_the_state_goes_round() -> None:
    first = EMA(0.9, buffers="average")
    trainer([first], normed(), epochs=1).fit()
    state = {"updates": first.state_dict()["updates"], "weights": {**first.state_dict()["weights"]}}
    assert state["updates"] == 4
    second = EMA(0.9, buffers="average")
    second.load_state_dict(state)
    assert second.state_dict() is state  # a checkpoint before fit() loses nothing
    second.on_fit_start(trainer(model=normed()))
    assert second.state_dict()["updates"] == 4
    for name, value in state["weights"].items():
        assert torch.equal(second.state_dict()["weights"][name], value)


def test_a_state_of_another_model_is_named() -> None:
    first = EMA()
    trainer([first], epochs=1).fit()
    second = EMA()
    second.load_state_dict(first.state_dict())
    with pytest.raises(TrainError, match=r"another model(?s:.)*not in the model: 2.weight"):
        second.on_fit_start(trainer(model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))))


@pytest.mark.parametrize("wrong", [{"decay": 1.5}, {"decay": float("nan")}, {"buffers": "none"}])
def test_bad_wishes(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="EMA"):
        EMA(**wrong)


def test_the_parts_of_fsdp() -> None:
    """Straight over fully_shard, with parts of unequal size: the same average, its state whole and the same again."""

    def work() -> tuple[list[dict[str, Tensor]], float]:
        from types import SimpleNamespace

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        def sharded() -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(model[0], mesh=mesh)
            return fully_shard(model, mesh=mesh)

        model: Any = sharded()
        training: Any = SimpleNamespace(model=model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        ema = EMA(0.9)
        ema.on_fit_start(training)
        hand: dict[str, Tensor] = {}
        x, y = data().tensors
        for _ in range(5):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.on_step_end(training)
            for name, value in _full(model).items():
                hand[name] = 0.9 * hand[name] + 0.1 * value if name in hand else value
        weights = _full(model)
        ema.on_evaluate_start(training)
        with torch.no_grad():
            evaluated = model(x)
        ema.on_evaluate_end(training, {})
        with torch.no_grad():
            after = model(x)
        bare = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
        bare.load_state_dict(hand)
        error = float((bare(x) - evaluated).detach().abs().max())
        bare.load_state_dict(weights)
        error = max(error, float((bare(x) - after).detach().abs().max()))

        state = ema.state_dict()
        other = EMA(0.9)
        other.load_state_dict(state)
        other.on_fit_start(SimpleNamespace(model=sharded()))  # type: ignore[arg-type]
        return [hand, state["weights"], other.state_dict()["weights"]], error

    for states, error in run_ranks(work, 2, limit_s=60):
        assert error < 1e-6
        hand, saved, again = states
        for name, value in hand.items():
            torch.testing.assert_close(saved[name], value)
            assert torch.equal(saved[name], again[name])


def test_fsdp_has_the_average_and_the_norms_that_ddp_has() -> None:
    def fit(strategy: str) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
        ema = EMA(0.9)
        callbacks = [ema, GradientStats(every=4)]
        training = trainer(callbacks, eval_data=data(), metrics={"mae": mae}, log_every=4, strategy=strategy)
        training.fit()
        assert training.report is not None
        return ema.state_dict()["weights"], training.report.values, training.results

    def work() -> None:
        (wanted, norms, results), (weights, theirs, mine) = fit("ddp"), fit("fsdp")
        assert theirs == pytest.approx(norms, rel=1e-3)
        assert mine == pytest.approx(results, rel=1e-3)
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)

    run_ranks(work, 2, limit_s=90)


def test_it_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    def fit(epochs: int, strategy: str, folder: str, resume: str | None = None) -> dict[str, Tensor]:
        ema = EMA(0.9)
        trainer([ema], epochs=epochs, strategy=strategy, checkpoint=tmp_path / folder, resume=resume).fit()
        return ema.state_dict()["weights"]  # type: ignore[no-any-return]

    def work(strategy: str) -> None:
        wanted = fit(2, strategy, f"{strategy}-whole")
        fit(1, strategy, f"{strategy}-parts")
        found = fit(2, strategy, f"{strategy}-parts", resume="auto")
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)

    def both() -> None:
        work("ddp")
        work("fsdp")

    run_ranks(both, 2, limit_s=90)


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().full_tensor().clone() for name, value in model.named_parameters()}  # type: ignore[attr-defined]
