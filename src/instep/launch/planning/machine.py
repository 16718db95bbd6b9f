"""Facts about this machine that a plan needs."""

from __future__ import annotations

import math
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instep.launch.planning.devices import count_gpus
from instep.world.ports import band, ephemeral_range

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know of a machine.

    Attributes:
        host: its name.
        cores: CPU cores that this process may use: its affinity, and the quota of its control group.
        gpus: GPUs that this process may use.
        ports: the first and last port from which a master port is taken, outside the kernel's ephemeral range.
        ephemeral: the kernel's range.

    """

    host: str
    cores: int
    gpus: int
    ports: tuple[int, int]
    ephemeral: tuple[int, int]


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Look at this machine."""
    kernel = ephemeral_range()
    return Machine(socket.gethostname(), count_cores(), count_gpus(environ), band(kernel), kernel)


def count_cores() -> int:
    """CPU cores that this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


def _control_groups() -> dict[str, Path]:
    """Controller -> folder of this process's control group; "" is version 2."""
    found: dict[str, Path] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                found[name] = Path("/sys/fs/cgroup", name, path.lstrip("/"))
    return found


def _cpu_quota() -> float | None:
    """Cores that the control group grants, None where it sets no limit."""
    groups = _control_groups()
    with suppress(OSError, ValueError, KeyError):
        quota, period = (groups[""] / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else None
    with suppress(OSError, ValueError, KeyError):
        given = int((groups["cpu"] / "cpu.cfs_quota_us").read_text())
        return given / int((groups["cpu"] / "cpu.cfs_period_us").read_text()) if given > 0 else None
    return None


def out_of_memory_kills() -> int | None:
    """How many processes of this control group the out-of-memory killer has ended; None where nobody says."""
    groups = _control_groups()
    files = [groups[""] / "memory.events"] if "" in groups else []
    files += [groups["memory"] / "memory.oom_control"] if "memory" in groups else []
    for file in files:
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def kernel_says_out_of_memory(pid: int) -> bool:
    """Whether the kernel's log, where this user may read it, names the process as killed for want of memory."""
    needle = f"Killed process {pid} ".encode()
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        while record := os.read(log, 8192):
            if needle in record:
                return True
    except OSError:  # EAGAIN: the end of what there is
        pass
    finally:
        os.close(log)
    return False
