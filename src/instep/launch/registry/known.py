"""One's own runs that go on: what is seen of them on machines, what their ``run.json`` says, what Slurm knows."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.registry import errand
from instep.launch.registry.sightings import Sighting, look
from instep.runs import Outcome, launcher
from instep.runs.finding import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from instep.launch.agents.ssh import Way

_SLURM_S = 10.0


@dataclass(frozen=True)
class Run:
    """A run that goes on, or of which something is left.

    Attributes:
        name: its name.
        job: its marker.
        state: "running", or what else is known of it, in words.
        ranks: how many there are in all.
        hosts: the machines.
        start: when, ISO 8601 with the offset from UTC.
        via: local, ssh, mpirun, slurm; "" where nobody knows.
        pid: the launcher.
        launcher_host: its machine, "" where that is this one.
        slurm_job: the number of the Slurm job, None without one.
        folder: the run folder, "" where nobody knows.
        seen: processes on each machine that was looked at.

    """

    name: str
    job: str
    state: str
    ranks: int
    hosts: tuple[str, ...]
    start: str
    via: str
    pid: int | None
    launcher_host: str
    slurm_job: str | None
    folder: str
    seen: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "job": self.job,
            "state": self.state,
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "start": self.start,
            "via": self.via,
            "pid": self.pid,
            "launcher_host": self.launcher_host,
            "slurm_job": self.slurm_job,
            "folder": self.folder,
            "processes": {host: list(pids) for host, pids in self.seen.items()},
        }


@dataclass(frozen=True)
class Found:
    """All that was found.

    Attributes:
        runs: the oldest first.
        silent: why a machine did not answer, in one line.

    """

    runs: tuple[Run, ...]
    silent: dict[str, str]


def find(hosts: Sequence[str], way: Way, runs: Path, seconds: float) -> Found:
    """Look here, on these machines and into the runs folder.

    Args:
        hosts: what ssh is given.
        way: how they are reached.
        runs: the folder of all runs; it may be missing.
        seconds: how long each machine may take to answer.

    """
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(errand.send, {"do": "look"}, hosts, way, seconds)
        sightings = look()
        records = recorded(runs)
        answers = asked.result()
    silent = {one.host: one.why for one in answers if one.why}
    sightings += [Sighting.from_json(one) for answer in answers if not answer.why for one in answer.values["sightings"]]
    slurm = slurm_states() if any(record.get("slurm_job") for _, record in records) else None
    return Found(tuple(join(sightings, records, slurm)), silent)


def recorded(runs: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and record of the runs that have no end yet, as their ``run.json`` says."""
    found = []
    try:
        folders = sorted(path.parent for path in runs.glob("*/run.json"))
    except OSError:
        return []
    for folder in folders:
        try:
            record = read_record(folder)
        except RunError:
            continue
        if record["outcome"] == Outcome.RUNNING.value:
            found.append((folder, record))
    return found


def join(
    sightings: Iterable[Sighting],
    records: Iterable[tuple[Path, Mapping[str, Any]]],
    slurm: Mapping[str, str] | None,
) -> list[Run]:
    """One entry for each run.

    Args:
        sightings: from all machines.
        records: of the runs folder.
        slurm: the state of each of the user's Slurm jobs; None where nobody could be asked.

    """
    seen: dict[str, dict[str, Sighting]] = {}
    for one in sightings:
        seen.setdefault(one.job, {})[one.machine] = one  # a machine that is named twice is seen once
    known = {str(record["job"]): (str(folder.absolute()), record) for folder, record in records}
    for job, many in seen.items():
        folder = next((one.folder for one in many.values() if one.folder), "")
        record = next((one.record for one in many.values() if one.record is not None), None)
        if job not in known and record is not None:
            known[job] = (folder, record)
    jobs = [*seen, *(job for job in known if job not in seen)]
    return sorted((_run(job, list(seen.get(job, {}).values()), known.get(job), slurm) for job in jobs), key=_age)


def _age(run: Run) -> float:
    try:
        return datetime.fromisoformat(run.start).timestamp()
    except ValueError:
        return 0.0


def _run(
    job: str,
    many: Sequence[Sighting],
    known: tuple[str, Mapping[str, Any]] | None,
    slurm: Mapping[str, str] | None,
) -> Run:
    pids = {one.host: one.pids for one in many}
    start = min((one.start for one in many), default=0.0)
    when = datetime.fromtimestamp(start).astimezone().isoformat(timespec="seconds")
    if known is None:
        ranks = sum(one.ranks for one in many)
        state = "its run.json is gone, or is not to be seen from here"
        folder = next((one.folder for one in many if one.folder), "")
        name = Path(folder).name or job.rpartition("-")[0] or job
        return Run(name, job, state, ranks, tuple(pids), when, "", None, "", None, folder, pids)
    folder, record = known
    return Run(
        name=str(record["name"]),
        job=job,
        state=_state(record, many, slurm),
        ranks=int(record["world_size"]),
        hosts=tuple(map(str, record["hosts"])),
        start=str(record["start"]),
        via=str(record.get("via") or ""),
        pid=record.get("pid"),
        launcher_host="" if launcher.is_here(record) else launcher.host_of(record),
        slurm_job=record.get("slurm_job"),
        folder=folder,
        seen=pids,
    )


def _state(record: Mapping[str, Any], many: Sequence[Sighting], slurm: Mapping[str, str] | None) -> str:
    left = sum(len(one.pids) for one in many)
    processes = f"{left} process{'es' if left != 1 else ''}"
    if record["outcome"] != Outcome.RUNNING.value:
        return f"{record['outcome']}; {processes} left"
    if any(one.launcher is not None for one in many) or launcher.is_alive(record):
        return "running"
    if record.get("slurm_job"):
        return _slurm_state(str(record["slurm_job"]), slurm)
    looked_at = {one.machine for one in many} | {launcher.this_machine_id()}
    told = record.get("launcher")
    if not isinstance(told, dict) or told.get("machine") in looked_at:
        return f"lost its launcher; {processes} left" if left else "lost its launcher"
    return "running" if left else f"its launcher is on {launcher.host_of(record)}: ask with --hosts"


def _slurm_state(job: str, slurm: Mapping[str, str] | None) -> str:
    if slurm is None:
        return f"Slurm job {job}: squeue does not say"
    return slurm.get(job, f"Slurm job {job} has gone")


def slurm_states() -> dict[str, str] | None:
    """The state of each of this user's Slurm jobs that have not ended; None where Slurm does not answer."""
    if shutil.which("squeue") is None:
        return None
    words = ["squeue", "--noheader", "--user", str(os.getuid()), "--format", "%i|%A|%T|%r"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    states = {}
    for line in done.stdout.splitlines():
        job, raw, state, reason = (line.split("|", 3) + [""] * 3)[:4]
        states[job] = states[raw] = state.lower() + (f" ({reason})" if reason not in {"", "None"} else "")
    return states


def live_folders() -> list[Path]:
    """The folders, if they are there, of the runs that have a process on this machine."""
    return [Path(one.folder) for one in look() if one.record is not None]
