"""`instep ps`, `logs` and `stop` of a run over ssh, from its own machine and from another."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.cli.machines import INSTEP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.machines import Machines
    from tests.launch.jobs import Place

SCRIPT = """
    import os, pathlib, time

    print("hello from", os.environ["RANK"])
    pathlib.Path("up" + os.environ["RANK"]).touch()
    time.sleep(60)
"""


@contextmanager
def started(machines: Machines, place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """Four ranks on n1 and n2, from the head."""
    place.write("train.py", SCRIPT)
    words = ["--inventory", str(machines.inventory), "--nproc", "2", "--name", "mine", "train.py"]
    env = [f"{name}={value}" for name, value in place.env.items()]
    argv = machines.head.argv(["setpriv", "--pdeathsig", "KILL", "env", *env, INSTEP, "run", *words], cwd=place.path)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            deadline = time.monotonic() + 20
            while not all((place.path / f"up{rank}").exists() for rank in range(4)):
                assert time.monotonic() < deadline
                assert run.poll() is None
                time.sleep(0.05)
            yield run
        finally:
            run.kill()


def listed(machines: Machines, folder: Path) -> dict[str, Any]:
    found = json.loads(machines.instep("ps", "--json", cwd=folder).ok().out)
    (run,) = [run for run in found["runs"] if run["name"] == "mine"]
    return dict(run)


def test_it_is_listed_read_and_stopped(machines: Machines, place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with started(machines, place) as run:
        found = listed(machines, tmp_path / "elsewhere")
        assert (found["state"], found["ranks"], found["hosts"]) == ("running", 4, ["n1", "n2"])
        assert (found["via"], found["folder"]) == ("ssh", str(tmp_path / "runs" / "mine"))
        # The agent, the fork server and two ranks on each.
        assert {host: len(pids) for host, pids in found["processes"].items() if pids} == {"n1": 4, "n2": 4}
        logs = machines.head.run([INSTEP, "logs", "mine", "--rank", "all"], cwd=tmp_path).ok()
        assert logs.out.splitlines() == [f"[rank {rank}] hello from {rank}" for rank in range(4)]
        result = machines.head.run([INSTEP, "stop", "mine"], cwd=tmp_path / "elsewhere", limit_s=20).ok()
        assert run.wait(5) == 143
    assert "■ nothing is left of mine on 3 machines · " in result.err
    assert result.seconds < 8
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["outcome"] == "interrupted"


def test_it_is_stopped_from_one_of_its_machines(machines: Machines, place: Place, tmp_path: Path) -> None:
    """Whose processes alone are there; the launcher's machine has no sshd, so it cannot be asked."""
    with started(machines, place) as run:
        result = machines.nodes[0].run([INSTEP, "stop", "mine", "--grace", "1"], cwd=tmp_path, limit_s=30)
        assert result.rc == 1
        assert "✗ head did not answer" in result.err
        assert run.wait(10) != 0  # without its ranks the launcher ends by itself
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["outcome"] == "failed"


def test_its_launcher_is_killed(machines: Machines, place: Place, tmp_path: Path) -> None:
    with started(machines, place) as run:
        pid = json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["pid"]
        machines.head.run(["kill", "-KILL", str(pid)]).ok()
        run.wait(5)
        deadline = time.monotonic() + 10
        while (found := listed(machines, tmp_path))["state"] != "lost its launcher":
            assert time.monotonic() < deadline, found
    result = machines.head.run([INSTEP, "stop", "mine"], cwd=tmp_path, limit_s=20).ok()
    assert "run.json says interrupted now" in result.err
