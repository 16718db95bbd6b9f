"""``run.json``: what was started, where, with which code, and how it ended."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from instep.runs.launcher import this_launcher
from instep.runs.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def now() -> str:
    """The local time with its offset, to the millisecond: ``2026-01-31T12:00:00.000+01:00``."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


@dataclass
class RunRecord:
    """The contents of ``run.json``. One writer: the launcher.

    Attributes:
        name: the name of the run, also of its folder.
        command: what was typed, word by word.
        script: the script, folder or module that runs as ``__main__``.
        arguments: what it is given.
        cwd: where it runs.
        hosts: the machines, in the order of their ranks.
        world_size: number of ranks.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of each rank (OMP_NUM_THREADS).
        master: address and port where the ranks meet.
        job: the marker in the environment of all its processes (INSTEP_JOB).
        pid: the launcher.
        launcher: the rest that is needed to know it again: see :func:`instep.runs.launcher.this_launcher`.
        ssh_config: the file that ssh was given for the machines; None for the user's own.
        via: what started the ranks: local, ssh, mpirun or slurm.
        restarts: how often the ranks were started again after a failure.
        requeues: how often Slurm has started the job again.
        slurm_job: the number of the Slurm job, of an array ``12_3`` for its task 3; None without one.
        versions: of python, torch (None where it is not installed) and instep.
        git: see :class:`instep.runs.git.GitFacts`; None outside a repository.
        start: when, with the offset from UTC.
        end: the same, None while it runs.
        seconds: from start to end.
        outcome: how it ended.
        exit_code: of ``instep run``, None while it runs.
        exit_codes: of each rank, 128 + N where signal N ended it.
        first_failure: the rank that failed first, and how; or why the launcher ended the run.
        signal: the signal by which somebody asked the launcher to end the run, None where nobody did.

    """

    name: str
    command: list[str]
    script: str
    arguments: list[str]
    cwd: str
    hosts: list[str]
    world_size: int
    device: str
    threads: int
    master: str
    job: str
    pid: int
    launcher: dict[str, Any] = field(default_factory=this_launcher)
    ssh_config: str | None = None
    via: str = "local"
    restarts: int = 0
    requeues: int = 0
    slurm_job: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    start: str = field(default_factory=now)
    end: str | None = None
    seconds: float | None = None
    outcome: Outcome = Outcome.RUNNING
    exit_code: int | None = None
    exit_codes: dict[str, int] = field(default_factory=dict)
    first_failure: dict[str, Any] | None = None
    signal: str | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {**asdict(self), "outcome": self.outcome.value}

    def take_over(self) -> None:
        """From now on this process is the launcher."""
        self.pid, self.launcher = os.getpid(), this_launcher()

    def go_on(self, before: Mapping[str, Any]) -> None:
        """Be the same run as this record of it: what was typed, and when its ranks were started for the first time."""
        self.command = [str(word) for word in before.get("command") or self.command]
        self.start = str(before["start"])

    def write(self, folder: Path) -> None:
        """Write ``run.json`` whole or not at all: a reader never meets half of it.

        Raises:
            OSError: the folder is gone, full or read-only; the file of before is still there.

        """
        write_whole(folder / "run.json", json.dumps(self.as_json(), indent=2).encode() + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file by one with this content, in one step."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
