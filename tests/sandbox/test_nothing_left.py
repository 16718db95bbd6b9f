"""However a sandbox ends, and whenever, nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.cluster.machines import INSTEP
from tests.commands import MARKER, marked, run_command
from tests.sandbox.traces import BASE, traces

if TYPE_CHECKING:
    from collections.abc import Iterator

# `instep` with a cache of its own, so that an image has to be made.
OTHER_CACHE = """
import sys
from pathlib import Path
from instep.cli import main
from instep.sandbox import image
image.CACHE = Path(sys.argv.pop(1))
main()
"""


@pytest.fixture(autouse=True)
def _able() -> None:
    needs.need_sandbox()


@pytest.fixture
def name() -> Iterator[str]:
    name = f"g-{uuid.uuid4().hex[:6]}"
    yield name
    if (BASE / name).exists():  # a test has failed
        run_command([INSTEP, "sandbox", "down", "--name", name])


def started(argv: list[str], job: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, MARKER: job},
            start_new_session=True,
        )


def up(name: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    log = tmp_path / "up.log"
    process = started([INSTEP, "sandbox", "up", "--name", name, "--nodes", "2", "--share", str(tmp_path)], name, log)
    deadline = time.monotonic() + 600  # an image may have to be made first
    while "starting 2 machines" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_down(name: str, tmp_path: Path) -> None:
    run_command([INSTEP, "sandbox", "up", "--name", name, "--nodes", "2", "--share", str(tmp_path)], limit_s=600).ok()
    (tmp_path / "work").write_text("kept")
    assert len(traces(name)) > 5  # the search finds what is there
    run_command([INSTEP, "sandbox", "cut", "--name", name, "n1"]).ok()
    run_command([INSTEP, "sandbox", "kill", "--name", name, "n2"]).ok()
    done = run_command([INSTEP, "sandbox", "down", "--name", name]).ok()
    assert f"sandbox {name} is gone" in done.err
    assert traces(name) == []
    assert (tmp_path / "work").read_text() == "kept"


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.6])
def test_up_that_is_killed(name: str, tmp_path: Path, after_s: float) -> None:
    process = up(name, tmp_path)
    time.sleep(after_s)
    process.kill()
    process.wait()
    run_command([INSTEP, "sandbox", "down", "--name", name]).ok()
    assert traces(name) == []
    assert marked(name, wait_s=3) == ()


def test_up_after_one_that_was_killed(name: str, tmp_path: Path) -> None:
    process = up(name, tmp_path)
    second = run_command([INSTEP, "sandbox", "up", "--name", name])
    assert (second.rc, f"another command is at work on sandbox {name}" in second.err) == (2, True), second
    process.kill()
    process.wait()
    assert "half made" in run_command([INSTEP, "sandbox", "status", "--name", name]).ok().out
    words = ["sandbox", "up", "--name", name, "--nodes", "1", "--no-slurm", "--share", str(tmp_path)]
    done = run_command([INSTEP, *words]).ok()
    assert "removing what is left" in done.err
    assert run_command([INSTEP, "sandbox", "exec", "--name", name, "n1", "hostname"]).ok().out == "n1\n"
    run_command([INSTEP, "sandbox", "down", "--name", name]).ok()
    assert traces(name) == []


@pytest.mark.parametrize(
    ("number", "after_s"), [(signal.SIGINT, 0.0), (signal.SIGINT, 0.1), (signal.SIGINT, 0.5), (signal.SIGTERM, 0.3)]
)
def test_up_that_is_interrupted(name: str, tmp_path: Path, number: int, after_s: float) -> None:
    process = up(name, tmp_path)
    time.sleep(after_s)
    os.killpg(process.pid, number)
    time.sleep(0.05)
    os.killpg(process.pid, number)  # an impatient user
    assert process.wait(20) == 128 + number
    assert traces(name) == []
    said = (tmp_path / "up.log").read_text()
    assert "Traceback" not in said
    assert "interrupted" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_image_that_is_half_made(name: str, tmp_path: Path, number: int) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", OTHER_CACHE, str(cache), "sandbox"]
    process = started([*command, "up", "--name", name, "--nodes", "1", "--no-slurm"], name, tmp_path / "up.log")
    deadline = time.monotonic() + 60
    while not list(cache.glob(".building-*/root/*")):
        assert process.poll() is None, (tmp_path / "up.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.wait(20)
    assert marked(name, wait_s=5) == ()  # debootstrap and all that it has started
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    if number == signal.SIGKILL:
        run_command([*command, "down", "--name", name])
    assert list(cache.iterdir()) == []
    assert traces(name) == []
