"""The names in a folder of checkpoints, and whether the process that gave one still lives.

``step-N`` stands: it was renamed to that when it was whole. Beside it are hidden folders that one process is at work
on: ``.step-N.partial-OWNER`` is being written, ``.step-N.replaced-OWNER`` makes room for a new one of the same step,
``.step-N.removed-OWNER`` is being deleted. (``.step-0.seen-OWNER`` is an empty file that all ranks have to see.)
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_ASIDE = re.compile(r"\.step-(\d+)\.(partial|replaced|removed|seen)-(.+)-(\d+)-(\d+)-(\d+)-(\d+)")
_numbers = itertools.count()
Why = Literal["partial", "replaced", "removed", "seen"]


@dataclass(frozen=True)
class Aside:
    """What a hidden name says.

    Attributes:
        name: the name.
        step: of the checkpoint.
        why: what is being done to it.
        machine: the host and the number of its process namespace: where `pid` means something.
        pid: the process that made it.
        born: when that process started, in clock ticks since the host did.

    """

    name: str
    step: int
    why: str
    machine: tuple[str, int]
    pid: int
    born: int

    @property
    def here(self) -> bool:
        """Whether its process is, or was, one of this machine, so that :attr:`alive` can tell."""
        return self.machine == _machine()

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return _born(self.pid) == self.born


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name, None for another name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def aside(step: int, why: Why) -> str:
    """A new name for a hidden folder of this process."""
    host, space = _machine()
    return f".step-{step}.{why}-{host}-{space}-{os.getpid()}-{_born(os.getpid())}-{next(_numbers)}"


def read_aside(name: str) -> Aside | None:
    """What a hidden name says, None for any other."""
    found = _ASIDE.fullmatch(name)
    if found is None:
        return None
    step, why, host, space, pid, born, _ = found.groups()
    return Aside(name, int(step), why, (host, int(space)), int(pid), int(born))


def _machine() -> tuple[str, int]:
    """The host, and which process namespace on it: containers may share a host name, but not their process numbers."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        space = 0
    return re.sub(r"[^\w.]", "_", socket.gethostname()), space


def _born(pid: int) -> int:
    """When a process started, in clock ticks since the host did; -1 if there is none: proc(5), field 22 of `stat`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in ("Z", "X") else -1
    except (OSError, IndexError, ValueError):
        return -1
