"""The Slurm tutorial's program, on a small folder of real images: it runs, evaluates exactly, and goes on."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.needs import need_vision
from tests.recipes.images import write_image_folder
from tests.recipes.programs import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def train_twice(images: Path, runs: Path) -> list[Result]:
    options = ["--workers", "1", "--ema", "0.5", "--warmup-epochs", "0.5", "--checkpoints", str(runs / "saved")]
    first = start(images, runs, *options, "--epochs", "1", name="first")
    return [first, start(images, runs, *options, "--epochs", "2", "--steps", "8", name="again")]


def evaluate(images: Path, runs: Path, nproc: int) -> list[Result]:
    return [start(images, runs, "--steps", "0", "--workers", "0", nproc=nproc, name=str(nproc))]


Ends = dict[str, "Future[list[Result]]"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ends(images: Path, runs: Path) -> Iterator[Ends]:
    """Of all runs; two at a time, since each imports torch on one core."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            "trained": pool.submit(train_twice, images, runs),
            "on 1": pool.submit(evaluate, images, runs, 1),
            "on 2": pool.submit(evaluate, images, runs, 2),
            "no images": pool.submit(lambda: [start(runs, runs, nproc=1)]),
        }


def test_it_runs_to_the_end_and_goes_on(ends: Ends) -> None:
    first, again = (one.ok() for one in ends["trained"].result())

    assert "96 samples, 6 steps per epoch" in first.out
    assert "learning rate 0.00625 (scaled for global batch 16 from 256: linear)" in first.out
    top1, top5 = re.findall(r"^top-1 ([\d.]+)%, top-5 ([\d.]+)% of 42 images$", first.out, re.MULTILINE)[0]
    assert float(top1) <= float(top5)

    assert "after step 6, in epoch 2" in again.out
    assert "8 steps, 128 samples" in again.out


def test_the_evaluation_is_the_same_on_one_rank_and_on_two(runs: Path, ends: Ends) -> None:
    found = []
    for nproc in (1, 2):
        ends[f"on {nproc}"].result()[0].ok()
        found.append(evaluations(runs / str(nproc))[-1])

    assert set(found[0]) == {"loss", "top1", "top5"}
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_a_folder_that_is_no_image_folder_is_named(ends: Ends) -> None:
    (result,) = ends["no images"].result()

    assert result.rc == 2, str(result)
    assert "no train and no val folder" in result.err
