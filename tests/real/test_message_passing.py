"""recipes/message_passing.py under every launcher, for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import free_port, run_command
from tests.needs import need_tool

if TYPE_CHECKING:
    from tests.commands import Result
    from tests.real.slurm import Cluster

RECIPE = Path(__file__).parents[2] / "recipes" / "message_passing.py"
SCRIPT: list[str | Path] = [sys.executable, RECIPE]
OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
SENTENCE = re.compile(r"(?:rank 0 heard: )?rank \d+ (?:sent data to|has received data from) rank \d+")
NOISE = ("Traceback", "Connection reset", "destroy_process_group", "leaked")


def assert_told(result: Result, world_size: int, *, main_only: bool = False, errors: str | None = None) -> None:
    """Each rank has said its lines, once, and nobody has made noise: in these errors, or else in all that came."""
    sent = [f"rank 0 sent data to rank {rank}" for rank in range(1, world_size)]
    received = [f"rank {rank} has received data from rank 0" for rank in range(1, world_size)]
    heard = [f"rank 0 heard: {words}" for words in received]
    result.ok()
    # Not by lines: a launcher passes on what comes, and the end of a line may come a little later.
    told = SENTENCE.findall(result.out)
    assert sorted(told) == sorted(sent + heard + ([] if main_only else received)), str(result)
    errors = result.err if errors is None else errors
    assert not any(noise in errors for noise in NOISE), f"{errors}\n{result}"


LOCAL: dict[str, list[str | Path]] = {
    "torchrun": ["torchrun", "--nproc-per-node", "3", RECIPE],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "3", RECIPE],
    "openmpi": [*OPENMPI, "-np", "3", *SCRIPT],
    "mpich": ["mpiexec.mpich", "-n", "3", *SCRIPT],
    "instep run": ["instep", "run", "--nproc", "3", RECIPE],
}


@pytest.mark.parametrize("launcher", LOCAL)
def test_on_this_machine(launcher: str, tmp_path: Path) -> None:
    argv = LOCAL[launcher]
    need_tool(str(argv[0]))
    assert_told(run_command(argv, cwd=tmp_path), 3, main_only=launcher == "instep run")


def test_spawned() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    assert_told(run_command([*SCRIPT, "--spawn", "2", "--init-method", where]), 2)


def test_alone() -> None:
    result = run_command(SCRIPT).ok()
    assert result.out == "rank 0 is alone: there is nobody to send data to\n"


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        (["-N2", "--ntasks-per-node=2"], 4),
        (["-N2", "-n3", "--distribution=plane=1"], 3),  # ranks 0 and 2 on n1, 1 on n2
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_srun_with_one_task_for_each_rank(cluster: Cluster, options: list[str], world_size: int) -> None:
    assert_told(cluster.run(["srun", *options, *SCRIPT]), world_size)


@pytest.mark.parametrize("meet", ["", "file"])
def test_srun_with_one_task_for_each_node_that_spawns(cluster: Cluster, meet: str, tmp_path: Path) -> None:
    where = ["--init-method", f"file://{tmp_path}/meet"] if meet else []
    assert_told(cluster.run(["srun", "-N2", "--ntasks-per-node=1", *SCRIPT, "--spawn", "2", *where]), 4)


def test_torchrun_inside_srun(cluster: Cluster, tmp_path: Path) -> None:
    options = f"--nnodes 2 --node-rank $SLURM_NODEID --nproc-per-node 2 --master-addr n1 --master-port {free_port()}"
    # The ranks' errors into files: where the machines are slow, torchrun itself leaves with tracebacks of its store's.
    each = ["sh", "-c", f"exec torchrun {options} --redirects 2 --log-dir {tmp_path}/$SLURM_NODEID {RECIPE}"]
    result = cluster.run(["srun", "-N2", "--ntasks-per-node=1", *each])
    errors = [file.read_text() for file in tmp_path.rglob("stderr.log")]
    assert len(errors) == 4, str(result)
    assert_told(result, 4, errors="\n".join(errors))


@pytest.mark.parametrize("launcher", ["openmpi", "openmpi on one node", "mpich"])
def test_mpi_inside_an_allocation(cluster: Cluster, launcher: str) -> None:
    command, world_size = {
        "openmpi": ([*OPENMPI, "-np", "4", "--map-by", "node"], 4),
        "openmpi on one node": ([*OPENMPI, "-np", "2", "-H", "n2:2"], 2),
        "mpich": (["mpiexec.mpich", "-n", "4", "-ppn", "2"], 4),
    }[launcher]
    need_tool(command[0])
    salloc = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2"]
    assert_told(cluster.run([*salloc, *command, *SCRIPT]), world_size)


def test_an_allocation_without_a_launcher_is_refused(cluster: Cluster) -> None:
    result = cluster.run(["salloc", "--quiet", "-N2", "-n4", *SCRIPT])
    assert result.rc == 2, str(result)
    assert "srun" in result.err
    assert "Traceback" not in result.err
