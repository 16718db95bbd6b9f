"""The Lambda tutorial's program: it runs to the end, times what it says, and says what is missing."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.needs import need_vision
from tests.recipes.programs import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.commands import Result

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str) -> Result:
    command: list[str | Path] = [need_vision() / "instep", "run", "--nproc", "2", "--runs", folder / "runs"]
    return run_command([*command, RECIPES / "cifar10_resnet.py", *arguments], env=ONE_THREAD, cwd=folder, limit_s=120)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Result]]]:
    """Of a whole training, and of one without data; both at once, since each imports torch on one core."""
    whole, without = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("without")
    (without / "data").write_text("")  # a file where the folder would be: no download either
    small = ("--synthetic", "--arch", "resnet18", "--batch-size", "16", "--steps", "3")
    with ThreadPoolExecutor(2) as pool:
        yield {
            "whole": pool.submit(start, whole, *small),
            "without": pool.submit(start, without, "--arch", "resnet18"),
        }


def test_it_runs_to_the_end_and_times_what_it_says(ends: dict[str, Future[Result]]) -> None:
    first = ends["whole"].result().ok()

    assert re.search(r"^speed: [\d.]+ samples/s over 2 steps; the first 1 not timed$", first.out, re.MULTILINE)
    assert first.out.count("speed:") == 1  # the main rank speaks
    assert re.search(r"^test accuracy [\d.]+% after 3 steps$", first.out, re.MULTILINE)


def test_without_data_and_network_it_says_what_to_do(ends: dict[str, Future[Result]]) -> None:
    result = ends["without"].result()

    assert result.rc == 2, str(result)
    assert "CIFAR-10 is not there" in result.err
    assert "--synthetic" in result.err
