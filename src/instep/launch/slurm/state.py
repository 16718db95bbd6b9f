"""What Slurm knows of a job, from squeue alone: without an accounting database, by columns that are old and stable."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Column -> width. No text of a user's is among them, and the only one with blanks is the last.
_COLUMNS = {
    "JobArrayID": 40,
    "State": 20,
    "PreemptTime": 22,
    "RestartCnt": 8,
    "exit_code": 10,
    "StartTime": 22,
    "NodeList": 200,
    "ReasonList": 200,
}
_OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
}
_LIMIT_S = 20.0
_SAYS_GONE = "Invalid job id"  # what squeue says of a job that ended some minutes ago


@dataclass(frozen=True)
class JobState:
    """A job, or one task of an array.

    Attributes:
        job: its number; ``12_3`` for task 3 of the array 12.
        state: Slurm's word for it, such as RUNNING.
        is_preempted: whether Slurm has begun to take its machines away for another job.
        restarts: how often Slurm has started it again.
        status: exit code of the batch script, -N where signal N ended it.
        start: when it started, or is to start, as Slurm writes it; "" where it does not say.
        nodes: the machines it runs on, as Slurm writes them.
        reason: why it waits, "" where it does not.

    """

    job: str
    state: str
    is_preempted: bool = False
    restarts: int = 0
    status: int = 0
    start: str = ""
    nodes: str = ""
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it will never run again."""
        return self.state in _OVER

    @property
    def task(self) -> str:
        """The number within its array, "" outside of one."""
        return self.job.partition("_")[2]


@dataclass(frozen=True)
class Answer:
    """What squeue has answered.

    Attributes:
        jobs: the job, or all tasks of the array; empty where Slurm has forgotten it.
        why: why there was no answer, in squeue's words; "" where there was one.

    """

    jobs: tuple[JobState, ...] = ()
    why: str = ""


def look(job: str) -> Answer:
    """Ask about a job."""
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
    words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", f"--Format={columns}"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(why=str(error))
    if done.returncode:
        return Answer() if _SAYS_GONE in done.stderr else Answer(why=last_words(done.stderr) or "squeue failed")
    return Answer(tuple(parse(done.stdout)))


def parse(text: str) -> list[JobState]:
    """Read squeue's columns."""
    found = []
    for line in text.splitlines():
        values, at = {}, 0
        for name, width in _COLUMNS.items():
            values[name] = line[at : at + width].strip()
            at += width
        if values["JobArrayID"]:
            found.append(_job_state(values))
    return found


def _job_state(values: Mapping[str, str]) -> JobState:
    reason = values["ReasonList"]  # of a job that runs, its machines
    return JobState(
        job=values["JobArrayID"],
        state=values["State"],
        is_preempted=values["PreemptTime"] not in {"", "N/A"},
        restarts=_number(values["RestartCnt"]),
        status=_status(values["exit_code"]),
        start="" if values["StartTime"] == "N/A" else values["StartTime"],
        nodes=values["NodeList"],
        reason=reason[1:-1] if reason.startswith("(") else "",
    )


def _status(text: str) -> int:
    """From the form of wait(2), or from CODE:SIGNAL."""
    code, colon, number = text.partition(":")
    if colon:
        return -_number(number) or _number(code)
    waited = _number(text)
    return -(waited & 127) if waited & 127 else waited >> 8


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def last_words(text: str) -> str:
    """The last line that Slurm's command has printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def own_job(environ: Mapping[str, str]) -> str | None:
    """The number of the job that this process is part of, with that of the array's task; None outside."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or None


def own_restarts(environ: Mapping[str, str]) -> int:
    """How often Slurm has started this job again."""
    return _number(environ.get("SLURM_RESTART_COUNT", ""))
