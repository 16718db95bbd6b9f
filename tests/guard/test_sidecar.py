"""``instep.init(guard=True)`` under a real mpirun: found, told, ended; and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from textwrap import dedent

import pytest

from tests.commands import MARKER, marked, run_command
from tests.needs import need_tool

MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "3"]
OUT_OF_STEP = 86
SKIP = """
    import torch
    import torch.distributed as dist

    import instep

    with instep.init(guard=True, device="cpu") as session:
        for step in range(8):
            loss = torch.tensor(float("nan") if step == 5 and session.rank == 1 else 1.0)
            if not torch.isfinite(loss):
                continue
            dist.all_reduce(torch.ones(10))
"""
WELL = """
    import os

    import torch
    import torch.distributed as dist

    import instep

    with instep.init(guard=True, device="cpu") as session:
        for step in range(8):
            dist.all_reduce(torch.ones(10))
    print("well", os.environ.get("INSTEP_GUARD", ""))
"""
WAITS = """
    import time

    import instep

    with instep.init(guard=True, device="cpu") as session:
        open(f"up-{session.rank}", "w").close()
        time.sleep(60)
"""


def folders() -> set[str]:
    """Those that side-cars have in memory, not those of ``instep run``: their names are longer."""
    return {path.name for path in Path("/dev/shm").glob("instep-guard-" + "[0-9a-f]" * 16)}


@pytest.fixture(autouse=True)
def _launcher() -> None:
    need_tool(MPIRUN[0])


def script(folder: Path, text: str) -> list[str | Path]:
    path = folder / "job.py"
    path.write_text(dedent(text).lstrip())
    return [*MPIRUN, sys.executable, path]


def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path) -> None:
    before = folders()
    result = run_command(script(tmp_path, SKIP), cwd=tmp_path)  # fails if a process is left
    assert result.rc == OUT_OF_STEP, str(result)
    assert "rank 1 left the common path at job.py:9   if not torch.isfinite(loss):" in result.err, str(result)
    assert result.err.count("ranks out of step") == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("job-")
    found = json.loads((run / "desync.json").read_text())
    assert (found["ranks"], found["left_at"]["line"]) == ([1], 9)
    assert sorted(path.name for path in (run / "stacks").iterdir()) == [f"rank-{rank}.txt" for rank in range(3)]
    assert folders() <= before


def test_ranks_in_step_end_as_they_would_alone(tmp_path: Path) -> None:
    before = folders()
    result = run_command(script(tmp_path, WELL), cwd=tmp_path).ok()
    assert result.out.count("well") == 3
    assert not result.err, str(result)
    assert not (tmp_path / "runs").exists()
    assert folders() <= before


def test_it_goes_with_the_ranks(tmp_path: Path) -> None:
    before = folders()
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [str(word) for word in script(tmp_path, WAITS)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, MARKER: mark},
    ) as job:
        deadline = time.monotonic() + 40
        while len(list(tmp_path.glob("up-*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        ours = folders() - before
        os.kill(job.pid, signal.SIGINT)  # Open MPI's ranks end also where mpirun is killed
        assert job.stderr is not None
        told = job.stderr.read().decode()
    assert len(ours) == 1
    assert not marked(mark, wait_s=10.0)
    assert not folders() & ours
    assert "out of step" not in told


def test_under_instep_run_it_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(dedent(WELL).lstrip())
    before = folders()
    result = run_command([Path(sys.executable).parent / "instep", "run", "--nproc", "2", path], cwd=tmp_path).ok()
    assert "/instep-guard-" in result.out
    assert folders() <= before
