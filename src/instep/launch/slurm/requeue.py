"""Inside the job: take up the run folder; and when the ranks have saved and left, have Slurm start the job again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import InstepError, RunError
from instep.launch.ranks.signals import ENDING, PASSED_ON
from instep.launch.running.output import cannot_write
from instep.launch.slurm import state
from instep.launch.slurm.ending import write_end
from instep.runs import Outcome, now
from instep.runs.finding import read_record
from instep.runs.launcher import this_launcher
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from instep.launch.slurm.state import JobState

_SUBMITTER_S = 10.0  # how long sbatch's answer may take to reach run.json
_LIMIT_S = 60.0
_UNSAVED = "Slurm takes the machines for another job, and the program has not said that it saved (exit code 75)"


@dataclass(frozen=True)
class Stop:
    """How the ranks have left.

    Attributes:
        outcome: of the run, as it stands in ``run.json``.
        asked: the signal by which somebody asked the launcher to end, None for none.
        killed_by: the number of the signal that ended the rank that failed first, 0 where none did.
        restarts: how often Slurm has started the job before.

    """

    outcome: str
    asked: str | None
    killed_by: int
    restarts: int


@dataclass(frozen=True)
class Decision:
    """What is done about it.

    Attributes:
        requeue: whether Slurm is asked to start the job again.
        line: what the user is told, "" for nothing.

    """

    requeue: bool
    line: str = ""


def decide(stop: Stop, job: JobState | None, most: int) -> Decision:
    """Whether the job is to be started again.

    Once for each stop: Slurm itself starts a job again whose time it has cut short for another (its state is no longer
    RUNNING then), and one that somebody has cancelled stays ended.

    Args:
        stop: how the ranks have left.
        job: what Slurm says of the job; None where it does not answer.
        most: how often it may be started again.

    """
    saved = stop.outcome == Outcome.PREEMPTED.value
    is_evicted = stop.killed_by == signal.SIGTERM and job is not None and job.is_preempted
    if not saved and not is_evicted:
        return Decision(requeue=False)
    against = _against(stop, job, most)
    if against:
        return Decision(requeue=False, line=against)
    line = f"requeued, restart {stop.restarts + 1} of at most {most}: it goes on when Slurm starts it again"
    return Decision(requeue=True, line=line if saved else f"{line}. {_UNSAVED}")


def _against(stop: Stop, job: JobState | None, most: int) -> str:
    """Why not, "" for nothing."""
    if job is not None and job.state == "PENDING":
        return "Slurm has put the job back into its queue by itself"
    if stop.asked is not None and job is not None and job.is_preempted:
        return "Slurm ends the job for another one, and starts it again by itself where PreemptMode is REQUEUE"
    if stop.asked is not None:
        return f"not requeued: it was asked to end, by {stop.asked}"
    if job is not None and job.state != "RUNNING":
        return f"not requeued: Slurm says {job.state}"
    if stop.restarts >= most:
        again = f": it was started again {stop.restarts} times" if stop.restarts else ""
        return f"not requeued{again} (--max-requeues {most})"
    return ""


def was_ended(stop: Stop, job: JobState | None) -> bool:
    """Whether Slurm has ended the ranks, by scancel or at the time limit: it tells all at once, and us perhaps last."""
    is_killed = stop.outcome == Outcome.FAILED.value and stop.killed_by == signal.SIGTERM
    return is_killed and job is not None and job.state not in {"RUNNING", "PENDING"}


def in_batch(
    folder: Path, *, most: int, environ: Mapping[str, str], carry_out: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Carry out a run inside a batch job.

    Args:
        folder: the run folder of the job; of an array, what is common to those of its tasks.
        most: how often Slurm may be asked to start the job again.
        environ: of this process.
        carry_out: does the work in the folder it is given; returns what stands in ``run.json``.

    Returns:
        the same.

    Raises:
        InstepError: from `carry_out`; it stands in ``run.json`` then.

    """
    # A signal that comes before the ranks are watched, or after it, shall not end us without a word.
    for number in (*ENDING, *PASSED_ON):
        signal.signal(number, lambda *_: None)
    folder = take_up(folder, environ)
    try:
        result = carry_out(folder)
    except InstepError as error:
        write_end(folder, Outcome.FAILED, error.exit_code, str(error))
        raise
    if "folder" not in result:  # a signal came before anything was started
        write_end(folder, Outcome(result["outcome"]), int(result["exit_code"]), "asked to end before it began")
    job = state.own_job(environ)
    if job is None:
        return result
    first = result.get("first_failure") or {}
    stop = Stop(
        outcome=str(result["outcome"]),
        asked=result.get("signal"),
        killed_by=int(first.get("signal") or 0),
        restarts=state.own_restarts(environ),
    )
    found = _own_state(job) if _matters(stop) else None
    if was_ended(stop, found):
        return _interrupt(folder, result)
    decision = decide(stop, found, most)
    if decision.line:
        print(f"{'↻' if decision.requeue else '…'} {decision.line}", file=sys.stderr, flush=True)
    if decision.requeue:
        _requeue(job)
    return result


def _interrupt(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """What looks like a failing rank is the end that somebody wanted."""
    more = {"outcome": Outcome.INTERRUPTED.value, "exit_code": 128 + signal.SIGTERM, "signal": "SIGTERM"}
    record = read_record(folder) | more | {"first_failure": None}
    with suppress(OSError):
        write_whole(folder / "run.json", json.dumps(record, indent=2).encode() + b"\n")
    print("■ interrupted: Slurm ends the job", file=sys.stderr, flush=True)
    return {**result, **more, "first_failure": None}


def _matters(stop: Stop) -> bool:
    return stop.outcome == Outcome.PREEMPTED.value or stop.killed_by == signal.SIGTERM


def _own_state(job: str) -> JobState | None:
    answer = state.look(job)
    return answer.jobs[0] if answer.jobs else None


def _requeue(job: str) -> None:
    """Ask Slurm. It ends this process at once when it does what it is asked."""
    words = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        said = "" if done.returncode == 0 else state.last_words(done.stderr) or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        line = f"✗ Slurm does not requeue the job: {said}\n  → start it again by hand:  sbatch job.sbatch"
        print(line, file=sys.stderr, flush=True)


def take_up(folder: Path, environ: Mapping[str, str]) -> Path:
    """The run folder of this job, ready to be worked in.

    Args:
        folder: as the batch file names it.
        environ: of this process.

    Raises:
        RunError: it cannot be made.

    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if task:
        folder = folder.with_name(f"{folder.name}-{task}")
    folder = Path.cwd() / folder
    try:
        (folder / "log").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the run folder {folder} cannot be made", evidence=[str(error)]) from error
    deadline = time.monotonic() + _SUBMITTER_S
    while _is_being_submitted(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        _reopen(folder, environ)
    except OSError as error:
        raise cannot_write(folder / "run.json", error) from error
    return folder


def _reopen(folder: Path, environ: Mapping[str, str]) -> None:
    """The run is running from now on, also while nothing has been started yet; it began when it did so first."""
    try:
        record = read_record(folder)
    except RunError:
        return  # there is none
    if not record.get("pid"):
        record["start"] = now()
    record |= {"pid": os.getpid(), "launcher": this_launcher()}
    record |= {"slurm_job": state.own_job(environ), "requeues": state.own_restarts(environ)}
    record |= {"outcome": Outcome.RUNNING.value, "end": None, "seconds": None, "exit_code": None, "exit_codes": {}}
    record |= {"first_failure": None, "signal": None}
    write_whole(folder / "run.json", json.dumps(record, indent=2).encode() + b"\n")


def _is_being_submitted(folder: Path) -> bool:
    """Whether the one who submitted this job has not yet written its number: two writers would lose what one writes."""
    try:
        return read_record(folder).get("slurm_job") is None
    except RunError:
        return False
