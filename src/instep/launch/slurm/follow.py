"""Watch a submitted job from outside: what Slurm says of it, what it prints, how it ends."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.registry.reading import Reader
from instep.launch.running.telling import near
from instep.launch.slurm import state
from instep.launch.slurm.batch import OUTPUT
from instep.launch.slurm.ending import of_state, write_end
from instep.runs import Outcome
from instep.runs.finding import read_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from instep.launch.slurm.state import JobState
    from instep.launch.slurm.submit import Submitted

_PAUSE_S = 0.1
_SOON_S = 0.5  # between two questions to Slurm when there is news to expect
_LATER_S = 5.0  # and else: many may ask it
_RECORD_S = 5.0  # how long the last words may take from the job's machine to this one
EXIT_LEFT = 130
_TOO_MUCH = " (more than the partition has or allows: it will not start as it is; see  scontrol show partition)"
# What a user may want to do about a reason of Slurm's.
_ADVICE = {
    "PartitionConfig": _TOO_MUCH,
    "PartitionNodeLimit": _TOO_MUCH,
    "PartitionTimeLimit": _TOO_MUCH,
    "JobHeldUser": " (start it:  scontrol release JOB)",
}


class Follower:
    """Watches one job, or all tasks of an array.

    Args:
        submitted: the job.
        say: tells the user lines.
        stdout: the descriptor that takes what the job prints.

    """

    def __init__(self, submitted: Submitted, say: Callable[[list[str]], None], *, stdout: int = 1) -> None:
        self._submitted = submitted
        self._say = say
        self._stdout = stdout
        self._log = None if submitted.is_array else Reader(submitted.folder / OUTPUT, 0, prefixed=False)
        self._told: dict[str, str] = {}
        self._last: dict[str, JobState] = {}
        self._asked_at = 0.0
        self._is_silent = False

    def watch(self) -> dict[str, Any]:
        """Until the job will not run again.

        Returns:
            what stands in ``run.json``; of an array, of the task that failed first in its order, else of the last.

        Raises:
            KeyboardInterrupt: the user has seen enough.
            BrokenPipeError: nobody reads any more.

        """
        while not self._is_over():
            self._pass_on()
            self._pause()
        jobs = [self._last[job] for job in sorted(self._last, key=_in_order)]
        records = [self._end(job) for job in jobs] or [self._end(None)]
        self._pass_on()
        return next((one for one in records if one.get("exit_code")), records[-1])

    def _is_over(self) -> bool:
        """Ask Slurm, when it is time to."""
        now = time.monotonic()
        if now - self._asked_at < (_SOON_S if self._expects_news() else _LATER_S):
            return False
        answer = state.look(self._submitted.job)
        self._asked_at = time.monotonic()
        if answer.why:
            if not self._is_silent:
                self._say([f"… Slurm does not answer ({answer.why}); asking on"])
            self._is_silent = True
            return False
        self._is_silent = False
        for job in answer.jobs:
            self._last[job.job] = job
            self._tell(job)
        if not answer.jobs:  # it was over some minutes ago
            self._last = {name: replace(job, state="") for name, job in self._last.items() if job.task}
        return all(job.is_over for job in answer.jobs)

    def _expects_news(self) -> bool:
        """While the job waits, and when its record has an end."""
        if self._submitted.is_array or not any(job.state == "RUNNING" for job in self._last.values()):
            return True
        return _outcome(self._submitted.folder) != Outcome.RUNNING.value

    def _tell(self, job: JobState) -> None:
        line = describe(job, self._submitted.is_array)
        if line and self._told.get(job.job) != line:
            self._told[job.job] = line
            self._say([f"… {line}"])

    def _end(self, job: JobState | None) -> dict[str, Any]:
        """The record of a job that is over, which it gets now where its launcher could not write one."""
        folder = self._submitted.folder
        if job is not None and self._submitted.is_array:
            folder = folder.with_name(f"{folder.name}-{job.task}")
        deadline = time.monotonic() + _RECORD_S
        while _outcome(folder) in {Outcome.RUNNING.value, ""} and time.monotonic() < deadline:
            if job is not None and job.state == "CANCELLED" and not job.nodes:
                break  # it never ran
            self._pause()
        self._pass_on()
        forgotten = (Outcome.FAILED, 1, "Slurm has forgotten the job, and its launcher wrote no end")
        outcome, code, why = of_state(job) if job is not None and job.state else forgotten
        if write_end(folder, outcome, code, why):
            self._say([f"✗ {why}", *self._unseen(job)])
        try:
            record = read_record(folder)
        except RunError:
            self._say([f"✗ {job.job if job else self._submitted.job}: {why}"])
            return {"outcome": outcome.value, "exit_code": code, "folder": str(folder)}
        if self._submitted.is_array:
            self._say([f"  {near(folder)}: {record['outcome']}"])
        return {**record, "folder": str(folder)}

    def _unseen(self, job: JobState | None) -> list[str]:
        """A hint where Slurm could not even open the job's output."""
        if job is None or not job.nodes or self._log is None or self._log.path.exists():
            return []
        return [
            f"  {self._log.path} was not made: is the folder seen by {job.nodes}?  Then choose another:  --runs DIR"
        ]

    def _pass_on(self) -> None:
        """What the job has printed."""
        while self._log is not None and (data := self._log.read()):
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._stdout, view) :]
                except BlockingIOError:
                    select.select([], [self._stdout], [])

    def _pause(self) -> None:
        """Wait, but not when nobody reads any more."""
        waiting = select.poll()
        waiting.register(self._stdout, 0)
        if any(what & select.POLLERR for _, what in waiting.poll(_PAUSE_S * 1000)):
            raise BrokenPipeError


def _in_order(job: str) -> tuple[int, str]:
    task = job.partition("_")[2]
    return (int(task) if task.isdigit() else 0, job)


def describe(job: JobState, is_array: bool) -> str:
    """A line on a job that waits or runs, "" for one that is on its way out."""
    name = f"job {job.job}" + (f" (task {job.task})" if is_array else "")
    if job.state == "PENDING" and job.reason == "BeginTime" and not job.start:
        return ""  # about to start
    if job.state == "PENDING":
        again = f"is requeued (restart {job.restarts})" if job.restarts else "waits"
        advice = _ADVICE.get(job.reason, "").replace("JOB", job.job)
        reason = f": {job.reason}{advice}" if job.reason and job.reason != "None" else ""
        return f"{name} {again}{reason}{_not_before(job)}"
    if job.state == "RUNNING":
        return f"{name} runs on {job.nodes}"
    return f"{name}: {job.state}" if not job.is_over and job.state != "COMPLETING" else ""


def _not_before(job: JobState) -> str:
    """When a job will start that may not start earlier."""
    with suppress(ValueError):
        if job.reason == "BeginTime":
            return f", until {datetime.fromisoformat(job.start):%H:%M:%S}"
    return ""


def _outcome(folder: Path) -> str:
    """What stands in ``run.json`` now, "" where there is none."""
    with suppress(RunError):
        return str(read_record(folder)["outcome"])
    return ""


def follow(submitted: Submitted, say: Callable[[list[str]], None], *, stdout: int = 1) -> dict[str, Any]:
    """Watch until the job has ended for good, or Ctrl-C, which leaves the job alone.

    Returns:
        what stands in ``run.json``, and the "folder"; its "exit_code" is 130 after Ctrl-C.

    """
    try:
        return Follower(submitted, say, stdout=stdout).watch()
    except KeyboardInterrupt:
        name = near(submitted.folder)
        say([f"■ the job goes on without you: instep logs {name} --follow   ·   stop it: scancel {submitted.job}"])
        return {"outcome": Outcome.RUNNING.value, "exit_code": EXIT_LEFT, "folder": str(submitted.folder)}
    except BrokenPipeError:
        return {"outcome": Outcome.RUNNING.value, "exit_code": 128 + 13, "folder": str(submitted.folder)}
