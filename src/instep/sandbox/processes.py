"""The processes of a sandbox: found by what they are tied to, never by a name, and ended by id."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from instep.errors import RunError
from instep.sandbox.state import MARKER, Process


def start_of(pid: int) -> int | None:
    """When a process was started, in clock ticks after the host's boot; None if it is gone."""
    with suppress(OSError, IndexError, ValueError):
        # pid (name) state ppid ...: the name may hold anything
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in {b"Z", b"X"} else int(fields[19])
    return None


def lives(process: Process) -> bool:
    """It runs, and it is the one that was meant."""
    return start_of(process.pid) == process.start


def leader(process: Process) -> int | None:
    """The first process of a machine, by the process that carries the machine; None before it is there."""
    with suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            children = (task / "children").read_text().split()
            if children and lives(process):
                return int(children[0])
    return None


def of(folder: Path) -> list[int]:
    """All processes of the machines below a folder: they run on a file system there, or carry its mark."""
    ours = Path("/proc/self/ns/mnt").readlink()
    spaces = {ours: False}  # mount namespaces, and whether a machine's file system is in it
    found = []
    for entry in Path("/proc").iterdir():
        pid = int(entry.name) if entry.name.isdigit() else 0
        if pid not in {0, os.getpid()}:
            with suppress(OSError):
                space = (entry / "ns/mnt").readlink()
                if space not in spaces:
                    spaces[space] = _sees(pid, folder)
                if spaces[space] or _marked(pid, folder):
                    found.append(pid)
    return found


def _sees(pid: int, folder: Path) -> bool:
    return f"upperdir={folder}/".encode() in Path(f"/proc/{pid}/mountinfo").read_bytes()


def _marked(pid: int, folder: Path) -> bool:
    environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    return any(f"\0{MARKER}={folder}{end}".encode() in environment for end in ("\0", "/"))


def end(folder: Path, limit_s: float = 15.0) -> None:
    """Kill them all, as a power cut would, and see them gone.

    Raises:
        RunError: one does not go.

    """
    deadline = time.monotonic() + limit_s
    pause = 0.005
    killed: set[Process] = set()  # a dying process is found no more, but may hold an interface still
    while (pids := of(folder)) or any(map(lives, killed)):
        if time.monotonic() > deadline:
            left = {*pids, *(process.pid for process in killed if lives(process))}
            evidence = [f"pid {pid}" for pid in sorted(left)]
            raise RunError(f"processes of {folder} do not end", evidence=evidence, cure="wait, and try again")
        for pid in pids:
            start = start_of(pid)
            if start is not None:
                killed.add(Process(pid, start))
                _kill(pid, folder)
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _kill(pid: int, folder: Path) -> None:
    """SIGKILL to what the number means now, if that is ours still."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _sees(pid, folder) or _marked(pid, folder):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
