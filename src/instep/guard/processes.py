"""What the system says of a rank's process, from outside: it answers also where the rank itself cannot. Linux."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instep.guard.records import Process

if TYPE_CHECKING:
    from collections.abc import Callable

_TICKS = os.sysconf("SC_CLK_TCK")
_SPAN_S = 1.5  # over which the CPU share is taken: shorter, and one tick of the kernel's clock would be much
_MOST_CHILDREN = 256
LAST_WORDS = 16_000  # characters
# Of x86-64, those in which a Python program sleeps. Elsewhere the kernel function alone is told.
_CALLS = {
    0: "read", 1: "write", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
    45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 202: "futex",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
}  # fmt: skip


class Processes:
    """Looks at the processes of the ranks, and remembers how much CPU time they had used.

    Args:
        last_words: the end of what a rank has written.

    """

    def __init__(self, last_words: Callable[[int], str] = lambda _: "") -> None:
        self._last_words = last_words
        self._used: dict[int, deque[tuple[float, float]]] = {}
        self._tree_used: dict[int, deque[tuple[float, float]]] = {}
        self._woken: dict[int, tuple[int, float | None]] = {}  # how often the main thread has slept, last seen to grow

    def sample(self, rank: int, pid: int) -> None:
        """Note the CPU time of the rank's own process: cheap enough to be done at each look."""
        with suppress(OSError, ValueError, IndexError):
            _note(self._used.setdefault(rank, deque()), _cpu_seconds(pid))

    def view(self, rank: int, pid: int | None, exit_code: int | None) -> Process:
        """What the system says now.

        Args:
            rank: of the world.
            pid: its process, None where it has not started.
            exit_code: once it has ended.

        """
        if exit_code is not None:
            words = self._last_words(rank) if exit_code else ""
            return Process(alive=False, state="", exit_code=exit_code, last_words=words[-LAST_WORDS:])
        if pid is None:
            return Process(alive=True)
        self.sample(rank, pid)
        children = descendants(pid)
        used = 0.0
        for child in children:
            with suppress(OSError, ValueError, IndexError):
                used += _cpu_seconds(child)
        _note(self._tree_used.setdefault(rank, deque()), used)
        busy = _share(self._used.get(rank)) + (_share(self._tree_used[rank]) if children else 0.0)
        state = _state(pid)
        # A process that ended badly says so in its last words before its parent has heard of its end.
        words = self._last_words(rank) if state in {"", "Z", "X"} else ""
        return Process(
            alive=state not in {"", "Z", "X"},
            state=state,
            busy=round(busy, 3),
            waits_in=_waits_in(pid) if state not in {"R", ""} else "",
            last_words=words[-LAST_WORDS:],
            woke_s=self._woke_s(rank, pid),
        )

    def _woke_s(self, rank: int, pid: int) -> float | None:
        """Seconds since the main thread was seen to have run."""
        count, now = _times_slept(pid), time.monotonic()
        before, at = self._woken.get(rank, (count, None))
        if count != before:
            at = now
        self._woken[rank] = (count, at)
        return None if at is None else now - at


def _note(samples: deque[tuple[float, float]], used: float) -> None:
    now = time.monotonic()
    samples.append((now, used))
    while len(samples) > 2 and samples[1][0] < now - _SPAN_S:
        samples.popleft()


def _share(samples: deque[tuple[float, float]] | None) -> float:
    if samples is None or len(samples) < 2:
        return 0.0
    (begin, before), (end, after) = samples[0], samples[-1]
    return max(0.0, after - before) / max(end - begin, 1e-3)


def _cpu_seconds(pid: int) -> float:
    """Of the process, and of those of its children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _state(pid: int) -> str:
    """Of the main thread: R, S, D, T, Z as in proc(5); "" where it has gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/task/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    return ""


def _times_slept(pid: int) -> int:
    """How often the main thread has gone to sleep so far."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process; a signal would wait for it to go on."""
    return _state(pid) in {"T", "t"}


def _waits_in(pid: int) -> str:
    """The system call and the kernel function in which the main thread sleeps, as far as this user may know."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        number = int(Path(f"/proc/{pid}/syscall").read_text().split()[0])
        found.append(_CALLS[number] if os.uname().machine == "x86_64" and number in _CALLS else "")
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        found.append("" if name == "0" else name)
    return " ".join(word for word in found if word)


def descendants(pid: int) -> list[int]:
    """Living children and their children; DataLoader workers for instance."""
    found: list[int] = []
    todo = [pid]
    while todo and len(found) < _MOST_CHILDREN:
        parent = todo.pop()
        with suppress(OSError, ValueError):
            for task in os.scandir(f"/proc/{parent}/task"):
                for child in map(int, Path(task.path, "children").read_text().split()):
                    found.append(child)
                    todo.append(child)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal, so that it would survive it."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
