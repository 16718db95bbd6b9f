"""Which process carries a run out: known again for certain, since the numbers of processes are used again. Linux."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def this_launcher() -> dict[str, Any]:
    """The own process, for ``run.json``: the name of its machine, which boot of it, and when the process started."""
    return {"host": socket.gethostname(), "machine": this_machine_id(), "since": started(os.getpid())}


def this_machine_id() -> str:
    """Tells apart what has process numbers of its own: machines, their boots, and containers on them."""
    boot, space = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return f"{boot} {space}".strip()


def started(pid: int) -> int | None:
    """When a living process started, in the kernel's clock ticks since its boot; None where there is none."""
    try:
        # pid (name) state ppid ...: the name may hold anything, a parenthesis as well
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in {b"Z", b"X"} else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_here(record: Mapping[str, Any]) -> bool:
    """Whether the launcher of this ``run.json`` was started on this machine since it booted."""
    launcher = record.get("launcher")
    return isinstance(launcher, dict) and launcher.get("machine") == this_machine_id()


def is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the launcher of this ``run.json`` is on this machine and lives."""
    if not is_here(record):
        return False
    pid, since = record.get("pid"), record["launcher"].get("since")
    return isinstance(pid, int) and pid > 0 and since is not None and started(pid) == since


def host_of(record: Mapping[str, Any]) -> str:
    """The name of the launcher's machine, "" where the record does not say."""
    launcher = record.get("launcher")
    return str(launcher.get("host") or "") if isinstance(launcher, dict) else ""
