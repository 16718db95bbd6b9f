"""The recipe learns, and gives the same figures on any number of ranks."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_job

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.py"


def train(*arguments: str) -> None:
    sys.argv = [str(RECIPE), *arguments]
    runpy.run_path(str(RECIPE), run_name="__main__")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    found = {}
    for nproc in (1, 3):
        file = tmp_path_factory.mktemp("digits") / "losses.json"
        done = run_job(train, nproc, "--losses", str(file), join=None, limit_s=60)
        found[nproc] = json.loads(file.read_text()) | {"output": done.outputs, "seconds": done.seconds}
    return found


@pytest.mark.parametrize("nproc", [1, 3])
def test_it_learns(results: dict[int, dict[str, Any]], nproc: int) -> None:
    result = results[nproc]

    assert result["right"] >= 0.97 * result["seen"]
    assert result["seen"] == 357  # every test image, once
    assert f"({result['right']} of 357 images)" in result["output"][0]
    assert result["output"][0].count("images/s") == 10
    assert all("accuracy" not in output for output in result["output"][1:])  # the main rank speaks


def test_the_figures_are_the_same(results: dict[int, dict[str, Any]]) -> None:
    assert results[3]["losses"] == pytest.approx(results[1]["losses"], abs=1e-4, rel=0)
    assert len(results[1]["losses"]) == 150
    assert results[3]["right"] == results[1]["right"]


@pytest.mark.parametrize("batch", ["1", "-2"])
def test_an_impossible_global_batch_is_refused(batch: str) -> None:
    with pytest.raises(Exception, match="global_batch") as caught:
        run_job(train, 2, "--global-batch", batch, join=None)
    assert f"global_batch={batch}" in str(caught.value)


def test_a_global_batch_need_not_be_a_multiple_of_the_ranks(tmp_path: Path) -> None:
    losses = []
    for nproc in (1, 2):
        run_job(train, nproc, "--global-batch", "97", "--epochs", "1", "--losses", str(tmp_path / "losses"), join=None)
        losses.append(json.loads((tmp_path / "losses").read_text())["losses"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4, rel=0)
