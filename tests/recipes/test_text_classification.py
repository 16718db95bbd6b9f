"""The recipe learns, at any number of ranks alike, and goes on where it was stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import Result, run_command
from tests.harness import run_job
from tests.recipes.programs import RECIPES, losses, right_of_all, run_recipe

INSTEP = Path(sys.executable).with_name("instep")
SHORT = ["--longest", "24"]  # words of a text


def train(folder: Path, nproc: int, *arguments: str) -> list[str]:
    words = ["text_classification.py", "--checkpoints", str(folder), *arguments]
    return run_job(run_recipe, nproc, *words, join=None, limit_s=90).outputs


def test_it_learns_and_every_number_of_ranks_gives_the_same_figures(tmp_path: Path) -> None:
    alone, *_ = train(tmp_path / "1", 1, "--epochs", "4", *SHORT)
    both, silent = train(tmp_path / "2", 2, "--epochs", "4", *SHORT)

    _, right, seen = right_of_all(alone)
    assert right > 0.6 * seen  # always the most frequent package: 0.17
    assert right_of_all(both) == right_of_all(alone)
    assert losses(both) == pytest.approx(losses(alone), abs=2e-3)
    assert not losses(silent)


def test_stopped_at_any_moment_it_goes_on_to_the_same_end(tmp_path: Path) -> None:
    options = [*SHORT, "--patience", "1", "--lr", "0.1"]

    def start(*arguments: str) -> Result:
        command: list[str | Path] = [INSTEP, "run", "--nproc", "2", "--runs", tmp_path / "runs"]
        words: list[str | Path] = [RECIPES / "text_classification.py", "--checkpoints", tmp_path / "parts"]
        return run_command([*command, *words, *options, *arguments], env={"OMP_NUM_THREADS": "1"}, limit_s=90)

    whole, _ = train(tmp_path / "whole", 2, *options)
    assert "accuracy has not become" in whole  # early stop

    stopped = start("--max-time", "0:00:01")
    assert stopped.rc == 75
    assert "asked to end" in stopped.err
    rest = start().ok()
    assert "goes on " in rest.out
    assert losses(rest.out)[-1] == losses(whole)[-1]
    assert right_of_all(rest.out) == right_of_all(whole)
