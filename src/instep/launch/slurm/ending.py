"""An end in ``run.json`` for a run whose launcher could not write one."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.runs import Outcome, now
from instep.runs.finding import read_record
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from instep.launch.slurm.state import JobState


def write_end(folder: Path, outcome: Outcome, code: int, message: str) -> bool:
    """Write it, unless there is one; whether that was done.

    Args:
        folder: of the run.
        outcome: how it ended.
        code: the exit code.
        message: why.

    """
    with suppress(OSError, RunError, ValueError):
        record = read_record(folder)
        if record["outcome"] != Outcome.RUNNING.value:
            return False
        record["end"] = now()
        begin = datetime.fromisoformat(record["start"])
        record["seconds"] = round((datetime.fromisoformat(record["end"]) - begin).total_seconds(), 3)
        record["outcome"], record["exit_code"] = outcome.value, code
        hosts = record["hosts"]
        record["first_failure"] = {"host": hosts[0] if hosts else "", "rank": None, "message": message}
        write_whole(folder / "run.json", json.dumps(record, indent=2).encode() + b"\n")
        return True
    return False


def of_state(job: JobState) -> tuple[Outcome, int, str]:
    """How a job ended of which Slurm alone can tell: outcome, exit code, and why."""
    if job.state == "CANCELLED":
        return Outcome.INTERRUPTED, 128 + 15, "Slurm says CANCELLED"
    code = job.status if job.status >= 0 else 128 - job.status
    how = f"exit code {job.status}" if job.status >= 0 else f"signal {-job.status}"
    return Outcome.FAILED, code or 1, f"Slurm says {job.state} ({how}); the launcher wrote no end"
