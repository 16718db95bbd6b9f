"""An abort is held, so that it can be seen what was wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from instep.guard import aborts
with open(sys.argv[1], "wb", buffering=0) as fatal:
    {before}
    print(aborts.hold(fatal), flush=True)
    {after}
    threading.Thread(target=ctypes.CDLL(None).abort).start()
    begin = time.monotonic()
    while time.monotonic() < begin + 20:
        time.sleep(0.05)
        print(os.fstat(fatal.fileno()).st_size > 0, flush=True)
"""


def run(tmp_path: Path, before: str = "", after: str = "") -> tuple[subprocess.CompletedProcess[str], float]:
    program = PROGRAM.format(before=before, after=after)
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "fatal"], capture_output=True, text=True, timeout=30, check=False
    )
    return result, time.monotonic() - begin


def test_program_goes_on_for_a_moment_and_ends_as_ever(tmp_path: Path) -> None:
    result, seconds = run(tmp_path)
    held, *lines = result.stdout.split()
    assert held == "True"
    assert len(lines) > 20  # its other threads still ran
    assert "True" in lines  # with the stacks written
    assert result.returncode == -signal.SIGABRT
    assert seconds < 15
    assert "Aborted" in (tmp_path / "fatal").read_text()


def test_released_it_ends_at_once(tmp_path: Path) -> None:
    result, seconds = run(tmp_path, after="aborts.release()")
    assert result.returncode == -signal.SIGABRT
    assert seconds < 5
    assert "Aborted" in result.stderr


def test_handler_of_the_program_stays(tmp_path: Path) -> None:
    result, _ = run(tmp_path, before="signal.signal(signal.SIGABRT, lambda *_: os._exit(5))")
    assert result.stdout.split()[0] == "False"
