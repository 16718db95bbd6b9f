"""Programs in which ranks fall out of step, of each kind and in many shapes: the kind, the ranks and the line named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instep.guard.verdict import judge
from tests.guard.building import World
from tests.guard.rows import calls, places

if TYPE_CHECKING:
    from pathlib import Path

    from instep.guard.verdicts import Verdict
    from tests.guard.rows import Row


def _judged(row: Row, folder: Path) -> tuple[Verdict | None, list[tuple[str, int]]]:
    files = row.source if isinstance(row.source, dict) else {"train.py": row.source}
    world = World(folder, files, row.nproc).run()
    try:
        return judge(world.views()), world.marked()
    finally:
        world.close()


@pytest.mark.parametrize("row", [*calls.ROWS, *places.ROWS], ids=lambda row: row.name)
def test_line(row: Row, tmp_path: Path) -> None:
    verdict, marked = _judged(row, tmp_path)
    assert verdict is not None
    found = (verdict.kind, verdict.ranks, verdict.left_at and (verdict.left_at.file, verdict.left_at.line))
    assert found[0] in row.kinds.split("|"), verdict
    assert found[1] == row.ranks, verdict
    assert found[2] in marked, verdict
