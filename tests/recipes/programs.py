"""Run a recipe as its reader would, and read what it prints."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def run_recipe(name: str, *arguments: str) -> None:
    """``python recipes/NAME ARGUMENTS``, on a rank of :func:`tests.harness.run_job` (with ``join=None``)."""
    file = RECIPES / name
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.parent))  # as python does
    runpy.run_path(str(file), run_name="__main__")


def losses(output: str) -> list[float]:
    """The loss of each report and each evaluation, in their order."""
    return [float(loss) for loss in re.findall(r"\bloss ([\d.e+-]+)", output)]


def right_of_all(output: str) -> tuple[str, int, int]:
    """The last line: test accuracy 98.60% (352 of 357 images)."""
    found = re.findall(r"^test accuracy ([\d.]+%) \((\d+) of (\d+) \w+\)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0][0], int(found[0][1]), int(found[0][2])
