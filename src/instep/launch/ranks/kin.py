"""The processes that descend from this one: keep them within reach, and end them. Linux."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, not of init.

    So a daemon that a rank started (``nohup … &``, a double fork) stays within reach.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)


def descendants() -> list[int]:
    """All living descendants of this process, parents first."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # pid (name) state ppid ...: the name may hold anything, a parenthesis as well
                state, parent = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state in {b"Z", b"X"}:
                    dead.add(int(entry.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # the list grows while it is read
        found += children.get(pid, ())
    return [pid for pid in found if pid not in dead]


def name_of(pid: int) -> str:
    """The command line of a process, for people."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return f"{brief([os.fsdecode(word) for word in words])} (pid {pid})"
    return f"pid {pid}"


def brief(words: Sequence[str]) -> str:
    """A command line for people: without the folders of the program, and of the script that python runs."""
    named = 2 if words and Path(words[0]).name.startswith("python") else 1
    text = " ".join([*(Path(word).name for word in words[:named]), *words[named:]])
    return text.encode(errors="replace").decode(errors="replace")[:80]


def reap() -> list[tuple[int, int]]:
    """Children that have ended, as (pid, status) with -N for signal N."""
    gone = []
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            gone.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return gone


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_descendants(patience: float, kind: float, limit: float = 5.0) -> list[str]:
    """Wait for all descendants to leave, then ask them (SIGTERM), then kill them.

    Args:
        patience: seconds to wait before anything is sent.
        kind: seconds between SIGTERM and SIGKILL.
        limit: seconds after which a process that even SIGKILL does not end (it waits in the kernel) is left alone.

    Returns:
        the names of those that had to be told.

    """
    if not _has_children():  # all descendants hang on one, since orphans come to us
        return []
    told: dict[int, str] = {}
    start = time.monotonic()
    asked = False
    pause = 0.001
    while True:
        reap()
        left = descendants()
        waited = time.monotonic() - start
        if not left or waited > patience + kind + limit:
            return list(told.values())
        if waited >= patience + kind:
            _send(left, signal.SIGKILL, told)
        elif waited >= patience and not asked:
            asked = True
            _send(left, signal.SIGTERM, told)
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def _send(pids: list[int], number: int, told: dict[int, str]) -> None:
    for pid in pids:
        told.setdefault(pid, name_of(pid))
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
