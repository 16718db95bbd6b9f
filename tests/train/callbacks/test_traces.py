"""Files for other tools: TensorBoard's events, read by TensorBoard, and torch.profiler's traces."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from instep.errors import TrainError
from instep.train.callbacks import Profiler, TensorBoard
from instep.train.events import on
from tests.harness import run_ranks
from tests.train.callbacks.toy import data, mae, trainer

if TYPE_CHECKING:
    from pathlib import Path


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"histograms": 0}).Reload()


def test_tensorboard_reads_what_the_main_rank_wrote(tmp_path: Path) -> None:
    def work() -> None:
        board = TensorBoard(tmp_path, histograms_every=4)
        trainer([board], eval_data=data(), metrics={"mae": mae}, log_every=2, epochs=2).fit()

    run_ranks(work, 2, limit_s=60)
    assert len(list(tmp_path.iterdir())) == 1
    events = events_of(tmp_path)
    assert {"train/loss", "train/lr", "train/samples_per_s", "train/data_wait", "eval/mae"} <= set(
        events.Tags()["scalars"]
    )
    assert [one.step for one in events.Scalars("train/loss")] == [2, 4, 6, 8]
    assert [one.step for one in events.Scalars("eval/mae")] == [4, 8]
    assert {one.step for one in events.Histograms("gradients/0.weight")} == {4, 8}
    assert events.Histograms("gradients/0.weight")[0].histogram_value.num == 32


def test_gradients_that_are_not_finite_have_no_histogram(tmp_path: Path) -> None:
    @on("gradients", every=2)
    def spoil(training: Any) -> None:
        next(training.model.parameters()).grad.fill_(float("inf"))

    board = TensorBoard(tmp_path, histograms_every=1)
    trainer([spoil, board], steps=2).fit()
    assert [one.step for one in events_of(tmp_path).Histograms("gradients/0.weight")] == [1]


def test_a_resume_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    trainer([TensorBoard(tmp_path)], log_every=2).fit()
    again = TensorBoard(tmp_path)
    training = trainer([again], log_every=2)
    training.fit()  # so that there is a report
    training.progress.step = 8
    again.on_fit_start(training)
    assert training.report is not None
    again.on_report(training, training.report)  # of step 12
    again.on_fit_end(training)
    assert [one.step for one in events_of(tmp_path).Scalars("train/loss")][-5:] == [2, 4, 6, 8, 12]


def test_tensorboard_that_is_missing_is_one_command_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainError, match=r"pip install 'instep\[tensorboard\]'"):
        trainer([TensorBoard(tmp_path)]).fit()


def test_tensorboard_without_a_folder() -> None:
    with pytest.raises(TrainError, match="no folder for TensorBoard"):
        trainer([TensorBoard()]).fit()


def steps_in(trace: Path) -> list[str]:
    """The step marks of a trace; and there are operators in it."""
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(one.get("name") == "aten::addmm" for one in events)
    return sorted({one["name"] for one in events if one.get("name", "").startswith("ProfilerStep")})


def test_traces_of_the_chosen_steps_and_ranks(tmp_path: Path) -> None:
    def work() -> None:
        callbacks = [Profiler(range(3, 6), ranks=[1], folder=tmp_path / "one")]
        trainer(callbacks, epochs=2).fit()
        trainer([Profiler(range(1, 3), ranks="all", folder=tmp_path / "all")], epochs=1).fit()

    run_ranks(work, 2, limit_s=60)
    assert [one.name for one in (tmp_path / "one").iterdir()] == ["rank-1.json"]
    assert len(steps_in(tmp_path / "one" / "rank-1.json")) == 3
    assert sorted(one.name for one in (tmp_path / "all").iterdir()) == ["rank-0.json", "rank-1.json"]
    assert len(steps_in(tmp_path / "all" / "rank-0.json")) == 2


def test_training_that_ends_in_the_middle_still_leaves_a_trace(tmp_path: Path) -> None:
    trainer([Profiler(range(3, 100), folder=tmp_path)], epochs=1).fit()
    assert steps_in(tmp_path / "rank-0.json")


def test_training_that_ends_before_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer([Profiler(range(50, 60), folder=tmp_path)], epochs=1).fit()
    assert "nothing to write: training ended after step 4, before step 50" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [range(3), range(5, 5), range(1, 9, 2), 3])
def test_steps_that_cannot_be(steps: Any) -> None:
    with pytest.raises(TrainError, match="Profiler cannot watch"):
        Profiler(steps)


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 7"):
        trainer([Profiler(ranks=[7], folder=tmp_path)]).fit()
