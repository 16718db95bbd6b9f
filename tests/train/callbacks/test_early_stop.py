"""Early stop: one decision for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import instep
from instep.errors import TrainError
from instep.train.callbacks import EarlyStop
from tests.harness import run_ranks
from tests.train.callbacks.toy import data, mae, trainer

if TYPE_CHECKING:
    from torch import Tensor


class Fed(EarlyStop):
    """Sees what the test gives it, in place of the metric."""

    def __init__(self, values: list[float], **options: Any) -> None:
        super().__init__("mae", **options)
        self.values = values

    def on_evaluate_end(self, training: Any, results: dict[str, float]) -> None:
        super().on_evaluate_end(training, {**results, "mae": self.values.pop(0)})


def steps_of(callback: EarlyStop) -> int:
    training = trainer([callback], eval_data=data(), metrics={"mae": mae}, epochs=6)
    training.fit()
    return training.progress.step


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([1, 2, 3, 4, 5, 6], {"larger_is_better": True, "patience": 1}, 6),
        ([6, 5, 4, 3, 2, 1], {"larger_is_better": True, "patience": 2}, 3),
        ([6, 5, 4, 4, 4, 1], {"larger_is_better": False, "patience": 2}, 5),
        ([1, 1.4, 1.9, 2.4, 3, 3.1], {"larger_is_better": True, "patience": 1, "min_delta": 0.5}, 2),
        ([3, float("nan"), 2, float("nan"), float("nan"), 1], {"larger_is_better": False, "patience": 2}, 5),
        ([float("nan")] * 6, {"larger_is_better": True, "patience": 3}, 3),
    ],
)
def test_it_stops_after_so_many_evaluations_without_gain(
    values: list[float], options: dict[str, Any], epochs: int
) -> None:
    assert steps_of(Fed(list(values), **options)) == 4 * epochs


def test_R12_a_metric_that_differs_by_rank_stops_all_ranks_after_the_same_step() -> None:
    def work() -> tuple[int, dict[str, Any]]:
        better, worse = [1.0, 2, 3, 4, 5, 6], [6.0, 5, 4, 3, 2, 1]
        stop = Fed(worse if instep.is_main() else better, larger_is_better=True, patience=2)
        return steps_of(stop), stop.state_dict()

    answers = run_ranks(work, 3, limit_s=60)
    assert answers == [(12, {"best": 6.0, "best_step": 4, "waited": 2})] * 3


def test_the_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    steps_of(Fed([0.5, 0.25, 0.125, 0, 0, 0], larger_is_better=True, patience=2))
    said = capsys.readouterr()
    assert "mae has not become larger for 2 evaluations: now 0.125, best 0.5 at step 4" in said.err + said.out


def test_the_state_goes_round_and_the_count_goes_on() -> None:
    first = Fed([5, 6, 6, 6, 6, 6], larger_is_better=False, patience=9)
    steps_of(first)
    second = Fed([6, 6, 6, 6, 6, 6], larger_is_better=False, patience=6)
    second.load_state_dict(first.state_dict())
    assert (second.best, second.best_step) == (5, 4)
    assert steps_of(second) == 4


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(TrainError, match=r"'f1', and no metric(?s:.)*there is: .*mae"):
        steps_of(EarlyStop("f1", larger_is_better=True))


def test_without_a_name_it_is_the_trainers_and_losses_are_better_when_smaller() -> None:
    stop = EarlyStop(patience=1)
    trainer([stop], eval_data=data(), metrics={"mae": mae}, monitor="mae", epochs=3).fit()
    assert stop.best is not None
    assert stop.best < 1.6  # it was better than at the beginning, which took more than one evaluation
    assert stop.best_step == 12


def test_nothing_to_watch() -> None:
    with pytest.raises(TrainError, match="what to watch"):
        trainer([EarlyStop()], eval_data=data()).fit()
    with pytest.raises(TrainError, match=r"watches 'loss'(?s:.)*there is: nothing"):
        trainer([EarlyStop("loss")]).fit()


def test_an_evaluation_of_other_data_on_its_own_does_not_count() -> None:
    def size(outputs: Tensor, targets: Tensor) -> float:
        return float(len(outputs))

    stop = EarlyStop("mae", larger_is_better=False)
    training = trainer([stop], eval_data=data(), metrics={"mae": mae}, epochs=1)
    training.fit()
    before = stop.state_dict()
    assert training.evaluate(data(), {"size": size})["size"] == 64
    assert stop.state_dict() == before


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"patience": 2.5}, {"min_delta": -1}, {"min_delta": float("nan")}])
def test_bad_wishes(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="EarlyStop cannot"):
        EarlyStop("mae", larger_is_better=True, **wrong)
