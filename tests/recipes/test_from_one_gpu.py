"""The page docs/from-one-gpu.md: its diffs apply, and what comes out gives the same figures on 1 and 2 ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.harness import run_job

PAGE = (Path(__file__).parents[2] / "docs" / "from-one-gpu.md").read_text()
REPORT = re.compile(r"epoch (\d+) loss ([\d.]+) accuracy ([\d.]+)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def patched(text: str, diff: str) -> str:
    """The text after a unified diff, whose hunks have to fit exactly."""
    lines, moved = text.splitlines(), 0
    for start, body in re.findall(r"^@@ -(\d+)(?:,\d+)? .*?@@\n(.*?)(?=^@@|\Z)", diff, re.MULTILINE | re.DOTALL):
        hunk = [line or " " for line in body.splitlines()]  # editors strip the blank of an empty line
        old = [line[1:] for line in hunk if line[0] in " -"]
        new = [line[1:] for line in hunk if line[0] in " +"]
        at = int(start) - 1 + moved
        assert lines[at : at + len(old)] == old, f"the hunk at line {start} does not fit"
        lines[at : at + len(old)] = new
        moved += len(new) - len(old)
    return "\n".join(lines) + "\n"


def stages() -> list[str]:
    """The script at the start and after each diff."""
    (script,) = blocks("python")
    found = [script]
    for diff in blocks("diff"):
        found.append(patched(found[-1], diff))
    return found


def run_script(script: str, folder: str, epochs: int) -> None:
    os.chdir(folder)
    file = Path(folder, f"train-{os.environ.get('RANK', '0')}.py")
    file.write_text(script)
    sys.argv = [str(file), "--epochs", str(epochs)]
    runpy.run_path(str(file), run_name="__main__")


def figures(output: str) -> list[tuple[int, float, float]]:
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in REPORT.findall(output)]


def test_there_is_a_diff_for_each_change() -> None:
    assert len(blocks("diff")) == 6
    assert len(re.findall(r"^## \d", PAGE, re.MULTILINE)) == 7


def run_all(scripts: list[str], folder: str) -> list[str]:
    outputs = []
    for script in scripts:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            run_script(script, folder, 2)
        outputs.append(output.getvalue())
    return outputs


def test_every_stage_runs_alone(tmp_path: Path) -> None:
    (outputs,) = run_job(run_all, 1, stages(), str(tmp_path), join=None, limit_s=60).values

    assert len(outputs) == 7
    for found in map(figures, outputs):
        assert [epoch for epoch, _, _ in found] == [0, 1]
        assert found[1][2] > 0.6
    assert (tmp_path / "best.pt").exists()


def test_the_last_stage_gives_the_same_figures_on_two_ranks(tmp_path: Path) -> None:
    script = stages()[-1]
    alone = figures(run_job(run_script, 1, script, str(tmp_path), 4, join=None).outputs[0])

    assert len(alone) == 4
    main, other = run_job(run_script, 2, script, str(tmp_path), 4, join=None, limit_s=60).outputs
    found = figures(main)
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in alone], abs=1e-4)
    assert [accuracy for _, _, accuracy in found] == [accuracy for _, _, accuracy in alone]
    assert not figures(other)  # the main rank alone reports
