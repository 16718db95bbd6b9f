"""The controls: programs that are slow, uneven or strange, but in step. The guard lets each come to its own end.

A control begins with the exit code that is its own: ``# CONTROL nproc=3 rc=0``, and ``long`` if it takes a minute.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.commands import HungError
from tests.guard import cases

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent / "in_step"
HEAD = re.compile(r"# CONTROL nproc=(\d+) rc=(\d+)(.*)")
LIMIT_S = 120.0


@dataclass(frozen=True)
class Control:
    """One program that is in step."""

    name: str
    script: Path
    nproc: int
    rc: int
    long: bool


@dataclass(frozen=True)
class Ended:
    """How it came to its end."""

    control: Control
    rc: int | None
    desync: str
    text: str

    @property
    def well(self) -> bool:
        """With its own exit code, and nothing was said of it."""
        return self.rc == self.control.rc and not self.desync


def find(folder: Path = HERE) -> list[Control]:
    """All controls in a folder."""
    return [read(script) for script in sorted(folder.glob("*.py"))]


def read(script: Path) -> Control:
    """A control, by its first line."""
    head = HEAD.match(script.read_text())
    assert head, f"{script} does not begin with its exit code"
    nproc, rc, more = head.groups()
    return Control(script.stem, script, int(nproc), int(rc), "long" in more.split())


def run(control: Control, *words: str, options: Sequence[str] = ()) -> Ended:
    """Run a control by ``instep run``, with some options of its; the words are for the program."""
    with tempfile.TemporaryDirectory(prefix="instep-control-") as name:
        rc, text = None, ""
        try:
            result = cases.start(
                control.script, *words, nproc=control.nproc, cwd=Path(name), options=options, limit_s=LIMIT_S
            )
            rc, text = result.rc, str(result)
        except HungError as hung:
            text = str(hung)
        desync = "\n".join(path.read_text() for path in Path(name).glob("runs/*/desync.json"))
    return Ended(control, rc, desync, text)
