"""The page docs/from-other-trainers.md: its instep program runs, and all that its tables name is there."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import instep
from tests.harness import run_job
from tests.recipes.pages import DOCS, blocks, run_blocks

PAGE = "from-other-trainers.md"


def program(folder: str) -> dict[str, Any]:
    task, script = blocks(PAGE)
    Path(folder, "task.py").write_text(task)
    sys.path.insert(0, folder)
    names, output = run_blocks(PAGE, [script], folder)
    trainer = names["trainer"]
    return {"results": trainer.results, "step": trainer.progress.step, "best": trainer.best, "output": output}


def test_the_program_learns_and_goes_on(tmp_path: Path) -> None:
    first, other = run_job(program, 2, str(tmp_path), join=None, limit_s=60).values
    again, _ = run_job(program, 2, str(tmp_path), join=None, limit_s=60).values

    assert first["step"] == again["step"] == 60  # 1437 samples by 2 ranks x 32 x 2, five times
    assert first["results"]["accuracy"] > 0.75
    assert first["results"] == other["results"] == again["results"]
    assert "goes on" in again["output"]


def test_every_program_is_python() -> None:
    assert len(blocks(PAGE, "text")) == 3
    for number, block in enumerate([*blocks(PAGE), *blocks(PAGE, "text")]):
        compile(block, f"{PAGE}, block {number}", "exec")


def test_what_the_tables_name_is_there() -> None:
    tables = "\n".join(line for line in (DOCS / PAGE).read_text().splitlines() if line.startswith("|"))
    right = "\n".join(line.rpartition(" | ")[2] for line in tables.splitlines())
    arguments = set(inspect.signature(instep.Trainer).parameters)
    for name in re.findall(r"`(\w+)=", right):
        assert name in arguments, name
    for name in re.findall(r"instep\.(\w+)\(", tables):
        assert hasattr(instep, name), name
    for name in re.findall(r"`(on_\w+)[`(]", right):
        assert hasattr(instep.train.Callback, name), name
    for name in re.findall(r"`([A-Z]\w+)[`(]", right):
        assert hasattr(instep.train, name), name
