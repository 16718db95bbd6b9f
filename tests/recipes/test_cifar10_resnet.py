"""The Lambda tutorial's program: it runs to the end, times what it says, and says what is missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.commands import run_command
from tests.needs import need_vision
from tests.recipes.programs import RECIPES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.commands import Result

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str) -> Result:
    command: list[str | Path] = [need_vision() / "instep", "run", "--nproc", "2", "--runs", folder / "runs"]
    return run_command([*command, RECIPES / "cifar10_resnet.py", *arguments], env=ONE_THREAD, cwd=folder, limit_s=120)


def test_it_runs_to_the_end_and_times_what_it_says(tmp_path: Path) -> None:
    first = start(tmp_path, "--synthetic", "--arch", "resnet18", "--batch-size", "16", "--steps", "3").ok()

    assert re.search(r"^speed: [\d.]+ samples/s over 2 steps; the first 1 not timed$", first.out, re.MULTILINE)
    assert first.out.count("speed:") == 1  # the main rank speaks
    assert re.search(r"^test accuracy [\d.]+% after 3 steps$", first.out, re.MULTILINE)


def test_without_data_and_network_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")  # a file where the folder would be: no download either
    result = start(tmp_path, "--arch", "resnet18")

    assert result.rc == 2, str(result)
    assert "CIFAR-10 is not there" in result.err
    assert "--synthetic" in result.err
