"""``instep stop``: end one run on all its machines, whatever started it, and see that nothing of it is left."""

from __future__ import annotations

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.registry import errand
from instep.launch.registry.known import slurm_states
from instep.launch.registry.sightings import processes
from instep.runs import Outcome, launcher, now
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from instep.launch.agents.ssh import Way

_MORE_S = 25.0  # what a machine may take beyond --grace: to connect, to kill, to look again
_SLURM_S = 15.0
_KILLED_S = 60.0  # Slurm's own KillWait is 30 s unless the site has changed it
_INTERRUPTED = 128 + 15


@dataclass(frozen=True)
class Goal:
    """What is to be ended.

    Attributes:
        name: of the run.
        job: its marker.
        folder: of the run; None where it is gone.
        record: what stands in ``run.json``; None where it is gone.
        hosts: its machines besides this one, as ssh is given them.
        way: how they are reached.
        grace: seconds between SIGTERM and SIGKILL.

    """

    name: str
    job: str
    folder: Path | None
    record: Mapping[str, Any] | None
    hosts: tuple[str, ...]
    way: Way
    grace: float

    @property
    def is_running(self) -> bool:
        """Whether the record has no end yet."""
        return self.record is not None and self.record["outcome"] == Outcome.RUNNING.value

    @property
    def slurm_job(self) -> str | None:
        """The number of its Slurm job."""
        job = self.record.get("slurm_job") if self.record is not None else None
        return str(job) if job else None


@dataclass
class Report:
    """What was done.

    Attributes:
        ended: names of processes that were ended on each machine without the launcher's help.
        killed: how many needed SIGKILL.
        left: names of processes that are still there, by machine.
        silent: why a machine did not answer.
        launcher: whether the launcher was asked.

    """

    ended: dict[str, list[str]] = field(default_factory=dict)
    killed: int = 0
    left: dict[str, list[str]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    launcher: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether it is known that nothing is left."""
        return not self.left and not self.silent


def stop(goal: Goal, say: Callable[[str], None]) -> Report:
    """End it.

    Args:
        goal: what.
        say: tells the user a line.

    Raises:
        RunError: Slurm refuses.

    """
    report = Report()
    if goal.slurm_job and is_batch(goal.slurm_job) and not launcher.is_alive(goal.record or {}):
        _cancel(goal, goal.slurm_job, say)
    elsewhere = launcher_elsewhere(goal)
    if elsewhere:
        say(f"… asking its launcher on {elsewhere}, pid {(goal.record or {}).get('pid')}")
        _add(report, errand.send(_errand(goal), [elsewhere], goal.way, goal.grace + _MORE_S))
    elif goal.record is not None and launcher.is_alive(goal.record):
        say(f"… SIGTERM to its launcher, pid {goal.record['pid']}, which ends the ranks")
    with ThreadPoolExecutor(1) as pool:
        # The launcher here ends all machines by itself: they are asked after it, and then nothing should be left.
        here = pool.submit(errand.run, _errand(goal))
        if goal.record is not None and launcher.is_alive(goal.record):
            here.result()
        hosts = [host for host in goal.hosts if host not in report.silent]
        answers = errand.send(_errand(goal), hosts, goal.way, goal.grace + _MORE_S)
        _add(report, [errand.Answer("this machine", here.result()), *answers])
    return report


def _errand(goal: Goal) -> dict[str, Any]:
    record = {name: (goal.record or {}).get(name) for name in ("pid", "launcher")} if goal.is_running else None
    return {"do": "end", "job": goal.job, "record": record, "grace": goal.grace}


def launcher_elsewhere(goal: Goal) -> str:
    """The other machine whose launcher is to be asked; "" where it is here, or Slurm's affair."""
    if not goal.is_running or goal.slurm_job or launcher.is_here(goal.record or {}):
        return ""
    return launcher.host_of(goal.record or {})


def _add(report: Report, answers: Sequence[errand.Answer]) -> None:
    for answer in answers:
        if answer.why:
            report.silent[answer.host] = answer.why
            continue
        done = answer.values["ended"]
        report.launcher = report.launcher or done["launcher"] is not None
        report.killed += done["killed"]
        for names, told in ((report.ended, done["told"]), (report.left, done["left"])):
            if told:
                names.setdefault(answer.host, []).extend(told)


def preview(goal: Goal) -> list[str]:
    """What :func:`stop` would do, looked up here and on all machines."""
    lines = []
    if goal.slurm_job and is_batch(goal.slurm_job) and not launcher.is_alive(goal.record or {}):
        lines.append(f"scancel {goal.slurm_job}")
    elsewhere = launcher_elsewhere(goal)
    if goal.record is not None and launcher.is_alive(goal.record):
        lines.append(f"SIGTERM to its launcher here, pid {goal.record['pid']}; once more after {goal.grace:g} s")
    elif elsewhere:
        lines.append(f"SIGTERM to its launcher on {elsewhere}, pid {(goal.record or {}).get('pid')}, if it lives")
    lines.append(f"then SIGTERM, and SIGKILL after {goal.grace:g} s, to whatever carries INSTEP_JOB={goal.job}:")
    hosts = list(dict.fromkeys([*([elsewhere] if elsewhere else []), *goal.hosts]))
    answers = errand.send({"do": "list", "job": goal.job}, hosts, goal.way, _MORE_S)
    for answer in [errand.Answer("this machine", {"processes": [one.name for one in processes(goal.job)]}), *answers]:
        told = [answer.why] if answer.why else answer.values["processes"]
        lines += [f"  {answer.host}: {line}" for line in told or ["nothing now"]]
    return lines


# ---- Slurm


def is_batch(job: str) -> bool:
    """Whether Slurm still has this job, and it came by sbatch: an allocation of salloc is the user's own."""
    try:
        words = ["scontrol", "show", "job", "--oneliner", job]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any("BatchFlag=1" in line and _is_open(line) for line in done.stdout.splitlines())


def _is_open(line: str) -> bool:
    state = re.search(r"\bJobState=(\w+)", line)
    return state is not None and state[1] in {"PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "REQUEUED", "STOPPED"}


def _cancel(goal: Goal, job: str, say: Callable[[str], None]) -> None:
    """Have Slurm end the job, and wait until it has gone from the queue."""
    say(f"… scancel {job}")
    _scancel(job)
    begin, killed = time.monotonic(), False
    while (states := slurm_states()) is not None and job in states:
        waited = time.monotonic() - begin
        if waited > goal.grace and not killed:
            killed = True
            _scancel("--signal=KILL", "--full", job)
        if waited > goal.grace + _KILLED_S:
            raise RunError(
                f"Slurm job {job} is still in the queue: {states[job]}",
                cure=f"see what Slurm says of it:  scontrol show job {job}",
            )
        time.sleep(0.3)


def _scancel(*words: str) -> None:
    try:
        done = subprocess.run(["scancel", *words], capture_output=True, text=True, timeout=_SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError("scancel cannot be asked", evidence=[str(error)]) from error
    if done.returncode and "--full" not in words:
        raise RunError(f"scancel {' '.join(words)} failed", evidence=done.stderr.splitlines()[:3])


# ---- the record of a launcher that has gone


def write_end(goal: Goal) -> bool:
    """Give the record an end where the launcher wrote none; whether that was done.

    Raises:
        RunError: it cannot be written.

    """
    if goal.folder is None or not goal.is_running:
        return False
    path = goal.folder / "run.json"
    try:
        record = json.loads(path.read_bytes())
        if record.get("job") != goal.job or record.get("outcome") != Outcome.RUNNING.value:
            return False  # it has one now
        begin = datetime.fromisoformat(record["start"])
        record["end"] = now()
        record["seconds"] = round((datetime.fromisoformat(record["end"]) - begin).total_seconds(), 3)
        record["outcome"], record["exit_code"] = Outcome.INTERRUPTED.value, _INTERRUPTED
        record["first_failure"] = {"host": launcher.host_of(record), "rank": None, "message": "ended by instep stop"}
        write_whole(path, json.dumps(record, indent=2).encode() + b"\n")
    except OSError as error:
        raise RunError(f"the end of the run cannot be written: {path}", evidence=[str(error.strerror)]) from error
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not what instep writes", evidence=[str(error)]) from error
    return True
