"""The cases: programs that fall out of step, each with the truth about itself in its head, and what came of a run.

A case is a script, or a folder with a ``main.py``. Its first line says what is true of it:

    # CASE nproc=3 kind=missing|mismatch ranks=1 line=@HERE

``ranks`` are the ones out of step; ``|`` separates answers that are all right. The line where they left the common
path ends with ``# <- HERE``, in whichever file of the case (several where one is as good as another); ``line=-``
where no line is to blame. ``silent``: nobody waits, the ranks go on with something wrong.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.commands import HungError, Result, run_command
from tests.launch.jobs import INSTEP

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent / "cases"
PEERS = HERE / "peers"  # programs of other trainers, for the environment that has these
HEAD = re.compile(r"# CASE nproc=(\d+) kind=(\S+) ranks=(\S+) line=(\S+)(.*)")
OUT_OF_STEP = 86
LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One program and the truth about it."""

    name: str
    script: Path
    nproc: int
    kinds: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    lines: frozenset[tuple[str, int]]
    silent: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: Case
    rc: int | None
    desync: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def reported(self) -> bool:
        return bool(self.desync) and (self.case.silent or self.rc == OUT_OF_STEP)

    @property
    def kind_right(self) -> bool:
        return self.reported and self.desync["kind"] in self.case.kinds

    @property
    def rank_right(self) -> bool:
        return self.reported and tuple(sorted(self.desync["ranks"])) in self.case.ranks

    @property
    def line_right(self) -> bool:
        return self.reported and (self.left_at in self.case.lines if self.case.lines else self.left_at is None)

    @property
    def left_at(self) -> tuple[str, int] | None:
        found = self.desync.get("left_at")
        return (str(Path(found["file"]).resolve()), int(found["line"])) if found else None

    @property
    def seconds(self) -> float | None:
        return self.desync.get("detected_after_s")

    def row(self) -> str:
        """One line of the table."""
        mark = {True: "yes", False: "NO"}
        place = f"{Path(self.left_at[0]).name}:{self.left_at[1]}" if self.left_at else "-"
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        wanted = " or ".join(sorted(f"{Path(file).name}:{line}" for file, line in self.case.lines)) or "-"
        said = f"{self.desync.get('kind', '-')} {self.desync.get('ranks', '-')} {place}"
        miss = "" if self.rank_right and self.line_right else f"   (truth: {list(self.case.ranks[0])} {wanted})"
        return (
            f"{self.case.name:24} {mark[self.rank_right]:>4} {mark[self.line_right]:>4} {mark[self.kind_right]:>4} "
            f"{seconds:>6}  exit {self.rc if self.rc is not None else 'HUNG':<4} {said}{miss}"
        )


HEADING = f"{'case':24} {'rank':>4} {'line':>4} {'kind':>4} {'s':>6}"


def find(folder: Path = HERE) -> list[Case]:
    """All cases in a folder."""
    scripts = [*folder.glob("*.py"), *folder.glob("*/main.py")]
    return [read(script) for script in sorted(scripts, key=_name)]


def read(script: Path) -> Case:
    """The truth about a case, from its first line and its marks."""
    head = HEAD.match(script.read_text())
    assert head, f"{script} does not begin with what is true of it"
    nproc, kinds, ranks, line, more = head.groups()
    files = script.parent.rglob("*.py") if script.name == "main.py" else [script]
    marked = frozenset(
        (str(file.resolve()), number)
        for file in files
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if text.endswith("# <- HERE")
    )
    assert bool(marked) == (line == "@HERE"), f"{script}: line={line}, but marks: {sorted(marked)}"
    return Case(
        name=_name(script),
        script=script,
        nproc=int(nproc),
        kinds=tuple(kinds.split("|")),
        ranks=tuple(tuple(int(rank) for rank in one.split(",")) for one in ranks.split("|")),
        lines=marked,
        silent="silent" in more.split(),
    )


def run(case: Case, folder: Path | None = None, *options: str, instep: str = INSTEP) -> Outcome:
    """Run a case by ``instep run``, with some options of its, in an empty folder, and see what is said of it."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="instep-case-") as name:
            return run(case, Path(name), *options, instep=instep)
    rc, text = None, ""
    try:
        result = start(case.script, nproc=case.nproc, cwd=folder, options=options, instep=instep)
        rc, text = result.rc, str(result)
    except HungError as hung:
        text = str(hung)
    reports = list(folder.glob("runs/*/desync.json"))
    return Outcome(case, rc, json.loads(reports[0].read_text()) if reports else {}, text)


def start(
    script: Path,
    *words: str,
    nproc: int,
    cwd: Path,
    options: Sequence[str] = (),
    instep: str = INSTEP,
    limit_s: float = LIMIT_S,
) -> Result:
    """Run a script by ``instep run``, to its end; the words are for the script."""
    argv = [instep, "run", "--nproc", str(nproc), *options, str(script), *words]
    return run_command(argv, limit_s=limit_s, cwd=cwd, env={"OMP_NUM_THREADS": "1"})


def _name(script: Path) -> str:
    return script.parent.name if script.name == "main.py" else script.stem
