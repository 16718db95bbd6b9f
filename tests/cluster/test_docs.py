"""The pages that show how to start a run, one for each way: each is typed on a machine of the sandbox, line by line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.transcripts import differs, read

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox

ROOT = Path(__file__).parents[2]
PAGES = ["laptop", "ssh", "openmpi", "slurm"]
MARK = "---- the next command"
LIMIT_S = 240


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_comes_back(sandbox: Sandbox, page: str) -> None:
    folder = sandbox.folder()
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    typed = read(ROOT / "docs" / f"{page}.md")
    assert typed, f"docs/{page}.md has no transcript"
    # All in one shell, as root on n1; standard error comes in between, as on a terminal.
    script = [f"export PATH={Path(sys.executable).parent}:$PATH", "exec 2>&1"]
    for one in typed:
        script += [f"echo; echo '{MARK}'", one.command]
    done = sandbox.exec("n1", ["bash", "-c", "\n".join(script)], cwd=folder, limit_s=LIMIT_S)
    printed = done.out.split(f"{MARK}\n")[1:]
    assert len(printed) == len(typed), done
    for one, text in zip(typed, printed, strict=True):
        wrong = differs(one.shown, text)
        assert not wrong, f"docs/{page}.md, line {one.line}: {one.command}\n{wrong}\n{done.err}"
