"""What people see of a training."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from instep.train.callbacks import MetricsLog, ProgressBar, default_callbacks
from instep.train.callbacks.progress import clock, number
from tests.harness import run_job
from tests.train.callbacks.toy import data, mae, trainer

PROGRAM = """
from tests.train.callbacks.toy import *
import sys
t = trainer(eval_data=data(), metrics={"mae": mae}, log_every=2, progress=True)
t.fit()
print("the program goes on", file=sys.stderr)
"""
ROOT = Path(__file__).parents[3]


def test_in_a_pipe_a_line_for_each_report_and_evaluation_by_the_main_rank() -> None:
    def work() -> None:
        trainer(eval_data=data(), metrics={"mae": mae}, log_every=2, epochs=2, progress=True).fit()

    main, other = run_job(work, 2).outputs
    lines = [line for line in main.splitlines() if line.startswith("epoch")]
    assert len(lines) == 6
    assert re.fullmatch(
        r"epoch  1/2   step    2/8   loss \d+\.\d{4}   +\d+ samples/s(   waiting for data \d+%)?   0:\d\d left",
        lines[0],
    ), lines[0]
    assert re.match(r"epoch  1/2   step    4/8   evaluation   .*mae \d\.\d{4}", lines[2]), lines[2]
    assert [line[:24] for line in lines if "evaluation" not in line] == [
        "epoch  1/2   step    2/8",
        "epoch  1/2   step    4/8",
        "epoch  2/2   step    6/8",
        "epoch  2/2   step    8/8",
    ]
    assert re.search(r"^8 steps, 128 samples, 0:\d\d$", main, re.MULTILINE)
    assert "epoch" not in other
    assert "\x1b" not in main


def test_on_a_terminal_one_bar_and_the_evaluations_above_it() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "PYTHONPATH": str(ROOT)},
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            select.select([ours], [], [])
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:
                break
        errors = process.stderr.read().decode() if process.stderr else ""
    os.close(ours)
    text = seen.decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert text.count("evaluation") == 3
    assert "━" in text
    assert "12/12" in text
    assert "samples/s" in text
    assert "12 steps, 192 samples" in text
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text  # the cursor is shown again


def test_a_reader_that_leaves_does_not_end_training() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    assert "the program goes on" in errors
    assert "Error" not in errors


@pytest.mark.parametrize("standard_output", ["open", "closed", "none"])
def test_standard_output_that_is_closed_or_none(standard_output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    if standard_output == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stdout", None if standard_output == "none" else stream)
    assert trainer(log_every=1, epochs=1, progress=True).fit().step == 4
    if standard_output == "open":  # what the others could not print
        assert stream.getvalue().count("epoch  1/1   step") == 4


def test_figures_for_people() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 754, 3723, 90000)] == [
        "0:00",
        "1:00",
        "12:34",
        "1:02:03",
        "25:00:00",
    ]
    assert [number(value) for value in (3, 0.0, 0.012345, 12.34567, 1.234e-5, 123456.7)] == [
        "3",
        "0.0",
        "0.0123",
        "12.3457",
        "1.234e-05",
        "1.235e+05",
    ]
    assert number(float("nan")) == "nan"


def test_what_is_on_unless_one_says_otherwise(tmp_path: Path) -> None:
    def names(*given: object, **options: object) -> list[str]:
        return [type(one).__name__ for one in default_callbacks(given, **options)]  # type: ignore[arg-type]

    assert names() == ["ProgressBar"]
    assert names(folder=tmp_path) == ["ProgressBar", "MetricsLog"]
    assert names(folder=tmp_path, progress=False) == ["MetricsLog"]
    mine = [MetricsLog(tmp_path / "mine.jsonl"), ProgressBar()]
    assert default_callbacks(mine, folder=tmp_path) == mine
