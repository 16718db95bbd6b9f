"""The page docs/trainer.md: its blocks run, and give the same figures on one rank and on two."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness import run_job
from tests.recipes.pages import DOCS, blocks, run_blocks

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "trainer.md"


def figures(folder: str) -> dict[str, Any]:
    names, output = run_blocks(PAGE, blocks(PAGE), folder)
    return {
        "results": names["results"],
        "others": names["others"],
        "worst": names["worst"],
        "steps": [names[one].progress.step for one in ("trainer", "noisy", "stopped", "divided")],
        "losses": [names[one].report.loss for one in ("trainer", "whole", "parts", "stopped", "divided")],
        "average": names["stopped"].results,
        "lines": len(names["notes"].lines),
        "predicted": names["scores"] is not None,
        "output": output,
    }


def test_the_blocks_give_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    for nproc in (1, 2):
        (tmp_path / str(nproc)).mkdir()
    (alone,) = run_job(figures, 1, str(tmp_path / "1"), join=None, limit_s=90).values
    main, other = run_job(figures, 2, str(tmp_path / "2"), join=None, limit_s=90).values

    assert alone["results"]["accuracy"] > 0.8
    for name in ("results", "others", "average", "losses"):
        assert main[name] == pytest.approx(alone[name], abs=1e-4), name
        assert other[name] == main[name], name
    assert alone["steps"] == main["steps"] == other["steps"] == [69, 20, 40, 10]
    # One report every 10 steps, and one at the end of the epoch.
    assert (alone["lines"], main["lines"], other["lines"]) == (5, 5, 0)
    assert (alone["predicted"], main["predicted"], other["predicted"]) == (True, True, False)


def test_the_summary_is_the_one_on_the_page(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```\n(world .*?)^```$", (DOCS / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    outputs = run_job(run_first, 2, str(tmp_path), join=None).values

    assert outputs[0].startswith(shown)
    assert outputs[1] == ""


def run_first(folder: str) -> str:
    return run_blocks(PAGE, blocks(PAGE)[:1], folder)[1]
