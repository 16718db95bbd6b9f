"""Whether a job is started again, and what Slurm's answers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from instep.launch.ranks.signals import would_end
from instep.launch.slurm import ending, follow, requeue, state
from instep.launch.slurm.requeue import Stop
from instep.launch.slurm.state import JobState
from instep.runs import Outcome

if TYPE_CHECKING:
    from pathlib import Path

TERM, KILL = 15, 9
RUNNING = JobState("12", "RUNNING", nodes="n1")
SAVED = Stop("preempted", None, 0, 0)


@pytest.mark.parametrize(
    ("stop", "job", "again", "words"),
    [
        (SAVED, RUNNING, True, "restart 1 of at most 3"),
        (SAVED, None, True, "restart 1 of at most 3"),  # Slurm does not answer now; it may when it is asked to requeue
        (Stop("preempted", None, 0, 2), RUNNING, True, "restart 3 of at most 3"),
        (Stop("preempted", None, 0, 3), RUNNING, False, "it was started again 3 times (--max-requeues 3)"),
        (SAVED, JobState("12", "RUNNING", is_preempted=True), True, "restart 1"),
        # Slurm has done it, or will not have it
        (SAVED, JobState("12", "PENDING"), False, "by itself"),
        (SAVED, JobState("12", "CANCELLED"), False, "Slurm says CANCELLED"),
        (SAVED, JobState("12", "COMPLETING"), False, "Slurm says COMPLETING"),
        # somebody wanted an end
        (Stop("preempted", "SIGTERM", 0, 0), RUNNING, False, "asked to end, by SIGTERM"),
        (Stop("preempted", "SIGINT", 0, 0), RUNNING, False, "asked to end, by SIGINT"),
        (Stop("preempted", "SIGTERM", 0, 0), JobState("12", "RUNNING", is_preempted=True), False, "for another one"),
        (Stop("interrupted", "SIGTERM", 0, 0), RUNNING, False, ""),
        # it has not saved
        (Stop("finished", None, 0, 0), RUNNING, False, ""),
        (Stop("failed", None, 0, 0), RUNNING, False, ""),
        (Stop("failed", None, KILL, 0), RUNNING, False, ""),
        (Stop("failed", None, TERM, 0), RUNNING, False, ""),
        (Stop("failed", None, TERM, 0), JobState("12", "RUNNING", is_preempted=True), True, "not said that it saved"),
        (Stop("failed", None, TERM, 3), JobState("12", "RUNNING", is_preempted=True), False, "--max-requeues 3"),
    ],
)
def test_decide(stop: Stop, job: JobState | None, again: bool, words: str) -> None:
    found = requeue.decide(stop, job, 3)
    assert found.requeue is again
    assert words in found.line
    assert bool(found.line) is bool(words)


@pytest.mark.parametrize(
    ("stop", "job", "ended"),
    [
        (Stop("failed", None, TERM, 0), JobState("12", "COMPLETING"), True),
        (Stop("failed", None, TERM, 0), JobState("12", "CANCELLED"), True),
        (Stop("failed", None, TERM, 0), RUNNING, False),  # somebody has killed a rank
        (Stop("failed", None, TERM, 0), None, False),
        (Stop("failed", None, KILL, 0), JobState("12", "COMPLETING"), False),
        (Stop("preempted", None, 0, 0), JobState("12", "COMPLETING"), False),
    ],
)
def test_whether_slurm_has_ended_the_ranks(stop: Stop, job: JobState | None, ended: bool) -> None:
    assert requeue.was_ended(stop, job) is ended


def row(*values: str) -> str:
    return "".join(value.ljust(width) for value, width in zip(values, state._COLUMNS.values(), strict=True))


def test_what_squeue_prints() -> None:
    text = "\n".join(
        [
            row("12", "RUNNING", "N/A", "1", "0", "2026-11-29T20:51:29", "n[1-2]", "n[1-2]"),
            row("13_2", "PENDING", "N/A", "0", "0", "N/A", "", "(JobArrayTaskLimit)"),
            row("14", "RUNNING", "2026-11-29T20:50:22", "0", "0", "2026-11-29T20:51:29", "n1", "n1"),
            row("15", "FAILED", "N/A", "0", "19200", "2026-11-29T20:51:29", "n1", "(NonZeroExitCode)"),
            row("16", "CANCELLED", "N/A", "0", "9", "2026-11-29T20:51:29", "n1", "n1"),
            row("17", "FAILED", "N/A", "0", "127:0", "2026-11-29T20:51:29", "n1", "n1"),  # as Slurm 24.11 has it
            row("18", "CANCELLED", "N/A", "0", "0:15", "2026-11-29T20:51:29", "n1", "n1"),
            "",
        ]
    )
    running, waiting, preempted, failed, killed, without, ended = state.parse(text)
    assert running == JobState("12", "RUNNING", restarts=1, start="2026-11-29T20:51:29", nodes="n[1-2]")
    assert waiting == JobState("13_2", "PENDING", reason="JobArrayTaskLimit")
    assert (waiting.task, running.task) == ("2", "")
    assert preempted.is_preempted
    assert (failed.status, failed.is_over) == (75, True)
    assert (killed.status, killed.is_over) == (-KILL, True)
    assert (without.status, ended.status) == (127, -TERM)
    assert not running.is_over


@pytest.mark.parametrize(
    ("environ", "job", "restarts"),
    [
        ({}, None, 0),
        ({"SLURM_JOB_ID": "12"}, "12", 0),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}, "12", 3),
        ({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}, "12_2", 0),
    ],
)
def test_the_own_job(environ: dict[str, str], job: str | None, restarts: int) -> None:
    assert state.own_job(environ) == job
    assert state.own_restarts(environ) == restarts


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (JobState("12", "PENDING", reason="Resources"), "job 12 waits: Resources"),
        (JobState("12", "PENDING", reason="None"), "job 12 waits"),
        (
            JobState("12", "PENDING", reason="JobHeldUser"),
            "job 12 waits: JobHeldUser (start it:  scontrol release 12)",
        ),
        (
            JobState("12", "PENDING", restarts=2, reason="BeginTime", start="2026-11-29T20:51:29"),
            "job 12 is requeued (restart 2): BeginTime, until 20:51:29",
        ),
        (JobState("12", "PENDING", restarts=2, reason="BeginTime"), ""),
        (RUNNING, "job 12 runs on n1"),
        (JobState("12", "SUSPENDED"), "job 12: SUSPENDED"),
        (JobState("12", "COMPLETING"), ""),
        (JobState("12", "FAILED"), ""),
    ],
)
def test_what_is_said_of_a_job(job: JobState, line: str) -> None:
    assert follow.describe(job, is_array=False) == line


@pytest.mark.parametrize(
    ("job", "outcome", "code"),
    [
        (JobState("12", "CANCELLED"), "interrupted", 143),
        (JobState("12", "TIMEOUT"), "failed", 1),
        (JobState("12", "NODE_FAIL", status=0), "failed", 1),
        (JobState("12", "FAILED", status=127), "failed", 127),
        (JobState("12", "OUT_OF_MEMORY", status=-KILL), "failed", 137),
    ],
)
def test_an_end_that_only_slurm_knows(tmp_path: Path, job: JobState, outcome: str, code: int) -> None:
    record = {"name": "x", "job": "x-1", "hosts": [], "world_size": 2, "outcome": "running"}
    write(tmp_path, record | {"start": "2026-11-29T20:51:29.000+00:00"})
    assert ending.write_end(tmp_path, *ending.of_state(job))
    found = read(tmp_path)
    assert (found["outcome"], found["exit_code"]) == (outcome, code)
    assert job.state in found["first_failure"]["message"]
    assert found["seconds"] > 0
    assert not ending.write_end(tmp_path, Outcome.FAILED, 1, "again")
    assert read(tmp_path) == found


def test_a_job_takes_its_folder_up_once_its_number_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    submitted = {"name": "x", "job": "x-1", "hosts": [], "world_size": 2, "outcome": "running", "pid": 0}
    write(folder, submitted | {"start": "2000-01-01T00:00:00.000+00:00", "slurm_job": "12"})
    environ = {"SLURM_JOB_ID": "12"}

    assert requeue.take_up(folder, environ) == folder
    first = read(folder)
    assert first["start"] > "2000-01-01T00:00:00.000+00:00"  # it was submitted then, and begins now
    assert (first["pid"], first["requeues"], first["slurm_job"]) == (os.getpid(), 0, "12")
    assert (folder / "log").is_dir()

    write(folder, first | {"outcome": "preempted", "exit_code": 75, "end": first["start"], "signal": "SIGTERM"})
    requeue.take_up(folder, environ | {"SLURM_RESTART_COUNT": "1"})
    again = read(folder)
    assert again == first | {"requeues": 1, "exit_codes": {}, "end": None, "signal": None, "exit_code": None}


def test_a_task_of_an_array_has_a_folder_of_its_own(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}
    assert requeue.take_up(tmp_path / "x", environ) == tmp_path / "x-2"
    assert (tmp_path / "x-2" / "log").is_dir()


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def write(folder: Path, record: dict[str, Any]) -> None:
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("", True),
        ("signal.signal(10, lambda *_: None)", False),
        ("signal.signal(10, signal.SIG_IGN)", False),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [10])", False),
    ],
)
def test_whom_a_signal_would_end(code: str, ends: bool) -> None:
    program = f"import signal, time\n{code}\nprint(flush=True)\ntime.sleep(20)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert would_end(process.pid, 10) is ends
        process.kill()
    assert not would_end(process.pid, 10)  # it is gone
