"""The guard over agents: ranks of two machines, or of one with an agent, are judged as those of one launcher are."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import needs
from tests.launch.jobs import INSTEP, Place
from tests.real.hosts import Host, hosts
from tests.real.sshd import sshd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.commands import Result

OUT_OF_STEP = 86
# The culprit skips a step, and all others wait for it at the end: it has ended by then, or waits for one of them.
SKIPS = """
    import os, pathlib, sys

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pathlib.Path("folder").write_text(os.environ.get("INSTEP_GUARD", ""))
    for step in range(8):
        loss = torch.tensor(float("nan") if step == 5 and dist.get_rank() == int(sys.argv[1]) else 1.0)
        if not torch.isfinite(loss):
            continue
        dist.all_reduce(torch.ones(10))
    if "waits" in sys.argv and dist.get_rank() == int(sys.argv[1]):
        dist.recv(torch.zeros(1), src=0)
    print("well", flush=True)
"""
SKIPS_AT = 11
STEPS = """
    import os, pathlib, time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pathlib.Path("folder").write_text(os.environ.get("INSTEP_GUARD", ""))
    pathlib.Path(f"up{dist.get_rank()}").touch()
    begin = time.monotonic()
    while time.monotonic() < begin + 30 and not os.path.exists("enough"):
        total = torch.zeros(1)
        dist.all_reduce(total)
        time.sleep(0.02)
"""
CRASHES = """
    import ctypes, os, time

    if os.environ["RANK"] == "1":
        print("before", flush=True)
        ctypes.string_at(0)
    time.sleep(30)
"""


@dataclass(frozen=True)
class Machines:
    """A head, and two machines with sshd and two slots each."""

    head: Host
    nodes: tuple[Host, ...]
    inventory: Path

    def run(self, folder: Path, *words: object, limit_s: float = 40) -> Result:
        """``instep run`` on the head."""
        argv = [INSTEP, "run", "--inventory", str(self.inventory), *map(str, words)]
        return self.head.run(argv, cwd=folder, limit_s=limit_s, env={"OMP_NUM_THREADS": "1"})

    def left(self) -> str:
        """Folders of the guard that are still there."""
        return "".join(
            host.run(["sh", "-c", "ls -d /dev/shm/instep-guard-* 2>/dev/null || true"]).ok().out
            for host in (self.head, *self.nodes)
        )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    needs.need_namespaces()
    needs.need_tool("sshd")
    folder = tmp_path_factory.mktemp("ssh")
    with hosts(["head", "n1", "n2"]) as (head, *nodes), sshd(nodes, folder) as config:
        inventory = folder / "inventory.toml"
        parts = "".join(f'[[machines]]\nname = "{node.name}"\nslots = 2\n' for node in nodes)
        inventory.write_text(f'ssh_config = "{config}"\n{parts}')
        yield Machines(head, tuple(nodes), inventory)


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def desync(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((only_run(folder) / "desync.json").read_text())
    return found


def test_a_rank_of_another_machine_is_named(machines: Machines, torch_place: Place, tmp_path: Path) -> None:
    torch_place.write("train.py", SKIPS)
    result = machines.run(tmp_path, "train.py", 3, "waits")
    assert result.rc == OUT_OF_STEP, result
    said = f"rank 3 left the common path at train.py:{SKIPS_AT}   if not torch.isfinite(loss):"
    assert result.err.count(said) == 1, result
    assert result.err.count("✗ ranks out of step") == 1, result
    found = desync(tmp_path)
    assert (found["ranks"], found["left_at"]["line"]) == ([3], SKIPS_AT)
    assert found["detected_after_s"] < 5
    for rank, host in enumerate(["n1", "n1", "n2", "n2"]):
        text = (only_run(tmp_path) / "stacks" / f"rank-{rank}.txt").read_text()
        assert text.startswith(f"rank {rank} on {host}: state "), text
        assert "all threads, innermost frame first:" in text, text
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert (record["outcome"], record["exit_code"], record["via"]) == ("out of step", OUT_OF_STEP, "ssh")
    assert (record["first_failure"]["host"], record["first_failure"]["rank"]) == ("n2", 3)
    assert machines.left() == ""


def test_a_job_in_step_ends_well(machines: Machines, torch_place: Place, tmp_path: Path) -> None:
    torch_place.write("train.py", SKIPS)
    result = machines.run(tmp_path, "--show", "all", "train.py", 99).ok()
    assert result.out.count("well") == 4
    assert "out of step" not in result.err
    assert not (only_run(tmp_path) / "desync.json").exists()
    assert machines.left() == ""


def test_a_machine_that_is_cut_off_is_lost_and_not_out_of_step(
    machines: Machines, torch_place: Place, tmp_path: Path
) -> None:
    torch_place.write("train.py", STEPS)
    argv = [INSTEP, "run", "--inventory", str(machines.inventory), "--guard-suspect", "1", "train.py"]
    with subprocess.Popen(
        machines.head.argv(argv, cwd=tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        wait_for(tmp_path, *(f"up{rank}" for rank in range(4)))
        time.sleep(1)
        machines.nodes[1].run(["ip", "link", "set", "eth0", "down"]).ok()
        try:
            out, _ = run.communicate(timeout=25)
        finally:
            machines.nodes[1].run(["ip", "link", "set", "eth0", "up"]).ok()
    assert "n2 is out of reach" in out, out
    assert "out of step" not in out
    assert not (only_run(tmp_path) / "desync.json").exists()
    record = json.loads((only_run(tmp_path) / "run.json").read_text())
    assert (record["outcome"], record["first_failure"]["host"]) == ("failed", "n2")


def wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 20
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.05)


# With one agent, on this machine: the same way without ssh.


def here(place: Place, *words: object) -> Result:
    return place.run("--hosts", "localhost:2", *words)


def gone(place: Place) -> bool:
    """Whether the ranks had a folder for their records, and it is there no more."""
    name = (place.path / "folder").read_text()
    assert "instep-guard-" in name
    return not Path(name).exists()


def test_only_told(torch_place: Place) -> None:
    torch_place.write("train.py", SKIPS)
    result = here(torch_place, "--guard", "warn", "train.py", 1)
    assert "the job goes on (--guard warn)" in result.err, result
    assert result.rc not in {0, OUT_OF_STEP}, result  # rank 0's own timeout, or the loss of rank 1
    assert desync(torch_place.path)["left_at"]["line"] == SKIPS_AT
    assert gone(torch_place)


def test_not_watched(torch_place: Place) -> None:
    torch_place.write("train.py", SKIPS)
    result = here(torch_place, "--no-guard", "train.py", 1)
    assert result.rc not in {0, OUT_OF_STEP}, result
    assert "out of step" not in result.err
    assert not (only_run(torch_place.path) / "desync.json").exists()
    assert (torch_place.path / "folder").read_text() == ""


def test_a_fault_in_silence_is_told_at_the_end(torch_place: Place) -> None:
    shutil.copy(Path(__file__).parents[1] / "guard" / "cases" / "sampler_seed.py", torch_place.path / "train.py")
    result = torch_place.run("--hosts", "localhost:2", "train.py").ok()
    assert "! ranks differ, and nothing fails or waits" in result.err, result
    assert desync(torch_place.path)["silent"]


def test_the_last_stacks_of_a_rank_come_into_its_log(place: Place) -> None:
    place.write("train.py", CRASHES)
    result = here(place, "train.py")
    assert result.rc == 128 + signal.SIGSEGV
    log = place.log(1)
    assert log.startswith("before\n")
    assert "Fatal Python error: Segmentation fault" in log
    assert "train.py" in log.partition("Fatal Python error")[2]


def test_ranks_that_fall_out_of_step_after_a_restart(torch_place: Place) -> None:
    torch_place.write("train.py", SKIPS)
    once = """
        import os, runpy, sys

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
        runpy.run_path("train.py", run_name="__main__")
    """
    torch_place.write("once.py", once)
    result = torch_place.run("--nproc", 2, "--max-restarts", 2, "once.py", 1)
    assert result.rc == OUT_OF_STEP, result
    record = torch_place.record()
    assert (record["outcome"], record["restarts"]) == ("out of step", 1)  # a fault of the program comes again


def test_a_launcher_that_was_stopped_does_not_judge_by_what_is_old(torch_place: Place) -> None:
    torch_place.write("train.py", STEPS)
    with torch_place.started("--hosts", "localhost:2", "--guard-suspect", "1", "train.py") as run:
        run.wait_for("up0", "up1")
        time.sleep(0.5)
        run.signal(signal.SIGTSTP)
        time.sleep(3)
        run.signal(signal.SIGCONT)
        time.sleep(1.5)
        (torch_place.path / "enough").touch()
        assert run.end() == 0, run.err
        assert "out of step" not in run.err


def test_an_agent_that_is_killed_leaves_no_folder(torch_place: Place) -> None:
    torch_place.write("train.py", STEPS)
    with torch_place.started("--hosts", "localhost:2", "train.py") as run:
        run.wait_for("up0", "up1")
        run.server.kill()  # the launcher's only child is the agent
        assert run.end() != 0
        assert "out of step" not in run.err
    deadline = time.monotonic() + 5
    while not gone(torch_place):
        assert time.monotonic() < deadline
        time.sleep(0.05)
