"""Run the blocks of Python in a page of docs/ as one program."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of one language in ``docs/PAGE``."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_blocks(page: str, chosen: list[str], folder: str) -> tuple[dict[str, Any], str]:
    """Run blocks one after the other in one namespace, with `folder` as the current one; (names, output)."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for number, block in enumerate(chosen):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names, output.getvalue()
