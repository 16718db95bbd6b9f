"""What of one's own runs is to be seen on this machine: found by the variables in the environment of its processes.

Needs the standard library only, and no run folder: it works where that was removed, and on machines that lack it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instep.launch.ranks import kin
from instep.runs import launcher

_RECORDED = (
    *("name", "job", "hosts", "world_size", "start", "via", "pid", "launcher", "outcome", "slurm_job", "cwd"),
    "ssh_config",
)
_LARGEST = 1 << 20  # bytes of an environment


@dataclass(frozen=True)
class Process:
    """A living process of this user that belongs to a run.

    Attributes:
        pid: its number.
        parent: the number of its parent.
        since: when it started, in clock ticks since boot: with its number it is this process and no other.
        job: the run's marker (INSTEP_JOB).
        folder: the run folder (INSTEP_RUN), "" where it was not told.
        words: its command line.

    """

    pid: int
    parent: int
    since: int
    job: str
    folder: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{kin.brief(self.words) or '?'} (pid {self.pid})"


@dataclass(frozen=True)
class Sighting:
    """A run on one machine.

    Attributes:
        job: its marker.
        host: the machine's name.
        machine: see :func:`instep.runs.launcher.this_machine_id`.
        folder: of the run, "" where nobody knows.
        pids: its processes here, without the launcher.
        ranks: how many of them are ranks.
        launcher: its number, where the launcher lives here.
        start: seconds since the epoch at which the oldest process started.
        record: what stands in ``run.json``; None where it cannot be read.

    """

    job: str
    host: str
    machine: str
    folder: str
    pids: tuple[int, ...]
    ranks: int
    launcher: int | None
    start: float
    record: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Sighting:
        """What :meth:`as_json` gave."""
        return cls(**{**values, "pids": tuple(values["pids"])})


def look() -> list[Sighting]:
    """All runs of this user that have a process here."""
    found: dict[str, list[Process]] = {}
    for process in processes():
        found.setdefault(process.job, []).append(process)
    folders = {job: next((one.folder for one in many if one.folder), "") for job, many in found.items()}
    launchers: dict[str, int] = {}
    for pid, folder, record in _launchers():
        job = str(record.get("job"))
        launchers[job] = pid
        folders.setdefault(job, folder)
    return [_sighting(job, folder, found.get(job, []), launchers.get(job)) for job, folder in folders.items()]


def _sighting(job: str, folder: str, many: list[Process], alive: int | None) -> Sighting:
    record = _record(folder, job)
    if alive is None and record is not None and launcher.is_alive(record):
        alive = int(record["pid"])
    starts = [one.since for one in many]
    if alive is not None and (since := launcher.started(alive)) is not None:
        starts.append(since)
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - min(starts, default=0) / os.sysconf("SC_CLK_TCK")
    return Sighting(
        job=job,
        host=socket.gethostname(),
        machine=launcher.this_machine_id(),
        folder=folder,
        pids=tuple(one.pid for one in many),
        ranks=len(_ranks(many)),
        launcher=alive,
        start=time.time() - ago,
        record=record,
    )


def processes(job: str | None = None) -> list[Process]:
    """The living processes of a run that are this user's, or of all runs; never this one."""
    needle = b"INSTEP_JOB=" + (job.encode() if job else b"")
    found = []
    for pid in _own_pids():
        process = _process(pid, needle)
        if process is not None and job in {None, process.job}:
            found.append(process)
    return found


def _own_pids() -> list[int]:
    me, found = os.getuid(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if entry.stat().st_uid == me:
                    found.append(int(entry.name))
    return sorted(found)


def _process(pid: int, needle: bytes) -> Process | None:
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            environ = file.read(_LARGEST)
    except OSError:  # gone, or one that even its owner may not look into
        return None
    if needle not in environ:
        return None
    values = dict(line.partition(b"=")[::2] for line in reversed(environ.split(b"\0")))
    job, since = os.fsdecode(values.get(b"INSTEP_JOB", b"")), launcher.started(pid)
    if not job or since is None:
        return None
    with suppress(OSError, ValueError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return Process(pid, parent, since, job, os.fsdecode(values.get(b"INSTEP_RUN", b"")), _words(pid))
    return None


def _words(pid: int) -> tuple[str, ...]:
    data = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    return tuple(os.fsdecode(word) for word in data.split(b"\0")) if data else ()


def _ranks(many: list[Process]) -> list[Process]:
    """Those that the fork server has forked, which have its command line; or those of tasks of mpirun and srun."""
    servers = {one.pid for one in many if _runs(one, "ranks/zygote")}
    return [one for one in many if (_runs(one, "ranks/zygote") and one.parent in servers) or _runs(one, "tasks/single")]


def _runs(process: Process, module: str) -> bool:
    return any(word.endswith(f"/launch/{module}.py") for word in process.words[1:3])


def _launchers() -> list[tuple[int, str, dict[str, Any]]]:
    """Living launchers of this user, with their run folder and record: each holds the logs of its run open.

    A launcher whose ranks are on other machines has no process here that carries the run's variables.
    """
    found = []
    for pid in _own_pids():
        with suppress(OSError):
            if not any("instep" in word for word in _words(pid)[:3]):
                continue
            for folder in _open_runs(pid):
                record = _record(folder)
                if record is not None and record.get("pid") == pid and launcher.is_alive(record):
                    found.append((pid, folder, record))
    return found


def _open_runs(pid: int) -> set[str]:
    """Run folders of whose logs the process holds one open."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = Path(entry.path).readlink()
            if path.parent.name == "log" and path.name.startswith("rank-"):
                found.add(str(path.parent.parent))
    return found


def _record(folder: str, job: str | None = None) -> dict[str, Any] | None:
    """What other machines need to know of ``run.json``; None where it is not to be had, or is of another run."""
    if not folder:
        return None
    try:
        values = json.loads(Path(folder, "run.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or (job is not None and values.get("job") != job):
        return None
    return {name: values.get(name) for name in _RECORDED}
