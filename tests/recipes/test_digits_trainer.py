"""The recipe learns, gives the same figures on any number of ranks, and under another torch."""

from __future__ import annotations

import pytest

from tests.commands import run_command
from tests.harness import run_job
from tests.needs import need_vision
from tests.recipes.programs import RECIPES, losses, right_of_all, run_recipe


@pytest.fixture(scope="module")
def outputs() -> dict[int, list[str]]:
    return {n: run_job(run_recipe, n, "digits_trainer.py", join=None, limit_s=90).outputs for n in (1, 3)}


def test_it_learns(outputs: dict[int, list[str]]) -> None:
    _, right, seen = right_of_all(outputs[1][0])

    assert seen == 357
    assert right >= 0.97 * seen
    assert "150 steps, 14400 samples" in outputs[1][0]


def test_the_figures_are_the_same(outputs: dict[int, list[str]]) -> None:
    main, *others = outputs[3]

    assert right_of_all(main) == right_of_all(outputs[1][0])
    assert losses(main) == pytest.approx(losses(outputs[1][0]), abs=2e-4)
    assert len(losses(main)) >= 20  # ten epochs, each with a report and an evaluation
    assert not any(losses(other) for other in others)  # the main rank speaks


def test_another_torch_gives_the_same_figures(outputs: dict[int, list[str]], tmp_path: object) -> None:
    instep = need_vision() / "instep"
    done = run_command(
        [instep, "run", "--nproc", "2", "--runs", str(tmp_path), RECIPES / "digits_trainer.py"],
        env={"OMP_NUM_THREADS": "1"},
        limit_s=120,
    ).ok()

    assert abs(right_of_all(done.out)[1] - right_of_all(outputs[1][0])[1]) <= 1
    assert losses(done.out) == pytest.approx(losses(outputs[1][0]), abs=2e-3)
