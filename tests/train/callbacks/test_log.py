"""metrics.jsonl: whole records in order, also over a resume."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from instep.errors import TrainError
from instep.train.callbacks import MetricsLog
from instep.train.events import Callback, on
from instep.train.state import Report
from tests.harness import run_ranks
from tests.train.callbacks.toy import data, mae, trainer

if TYPE_CHECKING:
    from pathlib import Path


def records(file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def test_an_object_for_each_report_and_evaluation_by_the_main_rank(tmp_path: Path) -> None:
    def work() -> None:
        trainer([MetricsLog(tmp_path / "m.jsonl")], eval_data=data(), metrics={"mae": mae}, log_every=2, epochs=2).fit()

    run_ranks(work, 2)
    found = records(tmp_path / "m.jsonl")
    assert [(one["kind"], one["step"]) for one in found] == [
        ("report", 2),
        ("report", 4),
        ("evaluation", 4),
        ("report", 6),
        ("report", 8),
        ("evaluation", 8),
    ]
    assert list(found[0]) == ["kind", "step", "epoch", "samples", "time", "values"]
    assert found[0]["samples"] == 32
    assert found[0]["values"].keys() >= {"loss", "lr", "samples_per_s", "data_wait", "step_s"}
    assert len(found[0]["values"]["step_s"]) == 2
    assert found[2]["values"].keys() >= {"mae"}
    assert sorted(one["time"] for one in found) == [one["time"] for one in found]


def test_it_is_on_where_there_is_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_RUN", str(tmp_path))  # what `instep run` tells its ranks
    trainer(log_every=2, epochs=1).fit()
    assert [one["step"] for one in records(tmp_path / "metrics.jsonl")] == [2, 4]


def test_without_a_folder_it_says_how_to_name_one() -> None:
    with pytest.raises(TrainError, match="no folder for the metrics log"):
        trainer([MetricsLog()]).fit()


def resumed(file: Path, step: int) -> MetricsLog:
    """A log of a run that goes on from `step`."""
    log = MetricsLog(file)
    training = trainer()
    training.progress.step = step
    log.on_fit_start(training)
    return log


def a_report(step: int, **values: float) -> Report:
    return Report(step, 0, 16 * step, 1.0, 0.5, 0.1, 100.0, 0.0, (0.1,), values)


def test_a_resume_leaves_no_step_twice_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    trainer([MetricsLog(file)], eval_data=data(), log_every=2, epochs=3).fit()  # to step 12, evaluated at 4, 8, 12
    with file.open("a") as torn:
        torn.write('{"kind": "report", "step": 14, "epo')  # killed in the middle of a line
    before = file.read_text()
    log = resumed(file, 8)
    log.on_evaluate_end(_at(8), {"loss": 1.0})  # done again after the resume: it is there already
    for step in (10, 12):
        log.on_report(_at(step), a_report(step))
    log.on_fit_end(_at(12))
    kept = [(one["kind"], one["step"]) for one in records(file)]
    assert [step for kind, step in kept if kind == "report"] == [2, 4, 6, 8, 10, 12]
    assert [step for kind, step in kept if kind == "evaluation"] == [4, 8]
    dropped = (tmp_path / "m.dropped.jsonl").read_text().splitlines()
    assert len(dropped) == 4
    assert set(dropped) <= set(before.splitlines())


def test_a_resume_that_repeats_nothing_changes_no_byte(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    trainer([MetricsLog(file)], log_every=2, epochs=1).fit()
    before = file.read_bytes()
    resumed(file, 4).on_fit_end(_at(4))
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["m.jsonl"]


def test_what_json_has_not_is_a_string(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    log = resumed(file, 0)
    log.on_report(_at(1), a_report(1, up=float("inf"), down=float("-inf"), what=float("nan")))
    log.on_fit_end(_at(1))
    values = records(file)[0]["values"]
    assert [values[name] for name in ("up", "down", "what")] == ["inf", "-inf", "nan"]


def test_a_reader_may_follow_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    seen: list[int] = []

    @on("report")
    def follow(training: Any, report: Report) -> None:
        seen.append(records(file)[-1]["step"])

    trainer([MetricsLog(file), follow], log_every=2, epochs=1).fit()
    assert seen == [2, 4]


def test_a_full_disk_ends_the_log_and_not_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog("/dev/full")
    steps = trainer([log], log_every=2, epochs=1)
    steps.fit()
    assert steps.progress.step == 4
    assert capsys.readouterr().err.count("The metrics log ends here") == 1


def _at(step: int) -> Any:
    training = trainer()
    training.progress.step = step
    return training


def test_its_class_is_of_the_main_rank() -> None:
    assert isinstance(MetricsLog(), Callback)
    assert MetricsLog.ranks == "main"
