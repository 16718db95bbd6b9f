"""Run a command in a test: it is killed at its limit, and nothing that it started may outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARKER = "INSTEP_TEST_JOB"
GRACE_S = 3.0  # what a clean exit may still need: a daemon that reaps, a kernel that tears down


class HungError(AssertionError):
    """Something did not end within its limit."""


class LeakedError(AssertionError):
    """Something ended and left processes behind."""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    argv: tuple[str, ...]
    rc: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{' '.join(self.argv)}\nexit code {self.rc} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )

    def ok(self) -> Result:
        """This result, if the command succeeded."""
        assert self.rc == 0, str(self)
        return self


def run_command(
    argv: Sequence[str | Path],
    *,
    limit_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: str = "",
) -> Result:
    """Run a command to its end.

    Args:
        argv: the command.
        limit_s: when to kill it, and everything that it started: the test fails with :class:`HungError`.
        env: variables to set besides those of this process.
        cwd: the folder to run it in.
        stdin: what it reads.

    """
    words = tuple(str(word) for word in argv)
    job = uuid.uuid4().hex
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            words,
            stdin=given,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {}), MARKER: job},
            cwd=cwd,
            start_new_session=True,
        )
        hung = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            seconds = time.monotonic() - started
            left = () if hung else marked(job, wait_s=GRACE_S)
            _kill(process, job)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        result = Result(words, process.returncode, texts[0], texts[1], seconds)
    if hung:
        raise HungError(f"killed at its limit of {limit_s:g} s: {result}")
    if left:
        raise LeakedError(f"{len(left)} processes outlived the command: {'; '.join(left)}\n{result}")
    return result


def marked(job: str, *, wait_s: float = 0.0) -> tuple[str, ...]:
    """The processes that carry this job's marker in their environment, after at most `wait_s` to go away."""
    deadline = time.monotonic() + wait_s
    while found := _find(job):
        if time.monotonic() >= deadline:
            return tuple(describe(process) for process in found)
        time.sleep(0.02)
    return ()


def describe(process: psutil.Process) -> str:
    """One line about a process, also if it is gone by now."""
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200] or process.name()}"
    except psutil.Error:
        return f"pid {process.pid} (gone)"


def _find(job: str) -> list[psutil.Process]:
    needle = f"{MARKER}={job}".encode()
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(psutil.Process(pid))
    return found


def _kill(process: subprocess.Popen[bytes], job: str) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while found := _find(job):
        for one in found:
            with suppress(psutil.Error):
                one.kill()
        time.sleep(0.01)
