"""The world of this very process: the environment, the script's arguments, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import instep
from instep.world import arguments
from tests.commands import run_command
from tests.world.test_resolve import STEP_2X2, TORCHRUN

INSTEP = [str(Path(sys.executable).with_name("instep"))]


def test_world_can_be_called_however_it_was_imported() -> None:
    import instep.world.record

    assert instep.world().world_size == 1
    assert instep.rank() == 0
    assert instep.is_main()


def test_importing_instep_imports_no_torch() -> None:
    code = "import instep, sys; instep.world(); from instep import launch, runs, cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("argv", "env", "found"),
    [
        (["s", "--local-rank=1", "--x"], LAUNCHED, (1, 1, 2)),
        (["s", "--local_rank=1"], LAUNCHED, (1, 1, 2)),
        (["s", "--local-rank", "1", "y"], LAUNCHED, (1, 1, 3)),
        (["s", "--local-rank=1"], {"RANK": "1"}, (1, 1, 2)),  # an old launcher
        (["s", "--local-rank=0"], LAUNCHED, None),  # the script's own
        (["s", "--x", "--local-rank=1"], LAUNCHED, None),
        (["s", "--local-rank=1"], {}, None),
        (["s", "--local-rank"], LAUNCHED, None),
        (["s"], LAUNCHED, None),
    ],
)
def test_local_rank_argument(argv: list[str], env: dict[str, str], found: tuple[int, int, int] | None) -> None:
    assert arguments.find(argv, env) == found


def test_local_rank_argument_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--local-rank=1", "--epochs", "3"])
    world = instep.world()
    assert sys.argv == ["train.py", "--epochs", "3"]
    assert (world.local_rank, world.launcher) == (1, "torch.distributed.launch")
    assert instep.world().local_rank == 1  # asked again, the argument is gone, the answer is the same


def test_command_json() -> None:
    done = run_command([*INSTEP, "world", "--json"], limit_s=30, env=STEP_2X2)
    said = json.loads(done.out)
    assert done.rc == 0
    assert (said["rank"], said["world_size"], said["local_rank"], said["local_world_size"]) == (3, 4, 1, 2)
    assert (said["node_rank"], said["num_nodes"], said["launcher"], said["job_id"]) == (1, 2, "slurm", "7")
    assert said["master_addr"] == "rack0node1"


def test_command_table_gives_a_reason_for_each_line() -> None:
    done = run_command([*INSTEP, "world"], limit_s=30, env=STEP_2X2)
    assert done.rc == 0
    for line in ("rank 3 of 4, started by slurm", "SLURM_PROCID=3", "SLURM_LOCALID=1", "derived from"):
        assert line in done.out


def test_command_refuses() -> None:
    done = run_command([*INSTEP, "world"], limit_s=30, env={"WORLD_SIZE": "2"})
    assert (done.rc, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert "WORLD_SIZE=2" in done.err


def test_a_script_ends_with_the_text_and_code_2() -> None:
    done = run_command(
        [sys.executable, "-c", "import instep; instep.init()"], limit_s=60, env={"RANK": "x", "WORLD_SIZE": "2"}
    )
    assert done.rc == 2
    assert "Traceback" not in done.err
    assert "RANK='x'" in done.err
