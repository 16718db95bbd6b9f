"""Jobs over ssh on the sandbox: what is left of them, and how long that takes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.jobs import Place

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox
    from tests.launch.jobs import Running

WITHIN_S = 10.0  # so long may anything of a job be left anywhere

# Says that it is there, with a helper that has left its session and its parent; and waits.
WAIT = """
    import os, subprocess, time
    from pathlib import Path
    rank = os.environ["RANK"]
    subprocess.run("nohup setsid sleep 7600 >/dev/null 2>&1 &", shell=True)
    print("rank", rank, "waits", flush=True)
    Path("ready" + rank).touch()
    time.sleep(600)
"""


@dataclass(frozen=True)
class Process:
    """A process of a job, on any machine: the containers' processes are this kernel's, too."""

    pid: int
    words: str
    host: str


def processes(marker: str) -> list[Process]:
    """All that carry a job's marker, in their environment or on their command line (ssh), on all machines."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes()
            environ = Path(entry.path, "environ").read_bytes()
            host = Path(entry.path, "ns", "uts").readlink()
        except OSError:
            continue
        if f"INSTEP_JOB={marker}".encode() in environ or marker.encode() in words:
            found.append(Process(int(entry.name), words.replace(b"\0", b" ").decode(errors="replace"), str(host)))
    return found


def seconds_until_gone(marker: str, begin: float) -> float:
    """Since when, until nothing of the job was left anywhere."""
    while left := processes(marker):
        seconds = time.monotonic() - begin
        assert seconds < 2 * WITHIN_S, left
        time.sleep(0.05)
    return time.monotonic() - begin


def place_on(sandbox: Sandbox, *, torch: bool = False) -> Place:
    """A folder that all machines share."""
    return Place(sandbox.folder(), torch=torch)


def options(sandbox: Sandbox, nproc: int = 1) -> list[str]:
    """Of `instep run`: on all machines of the sandbox, with its own ssh configuration."""
    return ["--inventory", str(sandbox.inventory), "--nproc", str(nproc)]


def ready(run: Running, ranks: int) -> str:
    """Wait for the ranks; the job's marker."""
    run.wait_for(*(f"ready{rank}" for rank in range(ranks)))
    return str(run.place.record()["job"])


def agent_of(run: Running, marker: str, rank: int) -> int:
    """The process id (of this kernel) of the agent on the machine that runs the rank."""
    here = {one.host for one in processes(marker) if f"RANK={rank}\0".encode() in _environ_of_children(one.pid)}
    (host,) = here or {""}
    (agent,) = [one.pid for one in processes(marker) if one.host == host and "agents.agent" in one.words]
    return agent


def _environ_of_children(pid: int) -> bytes:
    """What the helper that each rank starts was given: a rank's own table of the kernel is its fork server's."""
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""
