"""The Slurm tutorial's program, on a small folder of real images: it runs, evaluates exactly, and goes on."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.needs import need_vision
from tests.recipes.images import write_image_folder
from tests.recipes.programs import RECIPES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.commands import Result

SMALL = ["--arch", "resnet18", "--image-size", "32", "--batch-size", "8"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_image_folder(folder, train=16, val=7)
    return folder


def start(images: Path, runs: Path, *arguments: str, nproc: int = 2, name: str = "run") -> Result:
    command: list[str | Path] = [need_vision() / "instep", "run", "--nproc", str(nproc), "--runs", runs, "--name", name]
    words: list[str | Path] = [*command, RECIPES / "imagenet.py", images, *SMALL, *arguments]
    return run_command(words, env={"OMP_NUM_THREADS": "1"}, limit_s=120)


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["values"] for line in lines if line["kind"] == "evaluation"]


def test_it_runs_to_the_end_and_goes_on(images: Path, tmp_path: Path) -> None:
    options = ["--workers", "1", "--ema", "0.5", "--warmup-epochs", "0.5", "--checkpoints", str(tmp_path / "saved")]
    first = start(images, tmp_path, *options, "--epochs", "1", name="first").ok()

    assert "96 samples, 6 steps per epoch" in first.out
    assert "learning rate 0.00625 (scaled for global batch 16 from 256: linear)" in first.out
    top1, top5 = re.findall(r"^top-1 ([\d.]+)%, top-5 ([\d.]+)% of 42 images$", first.out, re.MULTILINE)[0]
    assert float(top1) <= float(top5)

    again = start(images, tmp_path, *options, "--epochs", "2", "--steps", "8", name="again").ok()
    assert "after step 6, in epoch 2" in again.out
    assert "8 steps, 128 samples" in again.out


def test_the_evaluation_is_the_same_on_one_rank_and_on_two(images: Path, tmp_path: Path) -> None:
    found = []
    for nproc in (1, 2):
        start(images, tmp_path, "--steps", "0", "--workers", "0", nproc=nproc, name=str(nproc)).ok()
        found.append(evaluations(tmp_path / str(nproc))[-1])

    assert set(found[0]) == {"loss", "top1", "top5"}
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_a_folder_that_is_no_image_folder_is_named(tmp_path: Path) -> None:
    result = start(tmp_path, tmp_path / "runs", nproc=1)

    assert result.rc == 2, str(result)
    assert "no train and no val folder" in result.err
