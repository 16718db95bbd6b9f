"""`instep world` says who it is under real launchers; and where nobody can know, it refuses."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from instep.errors import WorldError
from instep.world.nodelist import expand
from tests.harness import run_command
from tests.needs import need_tool
from tests.real import slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.commands import Result
    from tests.real.slurm import Cluster

FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


Run = Callable[[list[str]], "Result"]


def worlds(run: Run, launcher: str, folder: Path) -> list[dict[str, Any]]:
    """What the ranks say, in rank order. Each writes a file of its own: on one pipe they would mix."""
    each = ["sh", "-c", f"exec instep world --json >{folder}/$(hostname).$$"]
    run([*launcher.split(), *each]).ok()
    found = [json.loads(file.read_text()) for file in folder.iterdir()]
    return sorted(found, key=lambda world: int(world["rank"]))


def rows(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(world[field] for field in FIELDS) for world in found]


def places(found: list[dict[str, Any]]) -> set[tuple[str, str, int]]:
    return {(world["launcher"], world["master_addr"], world["master_port"]) for world in found}


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("-N2 --ntasks-per-node=2", [0, 0, 1, 1]),
        ("-N2 -n3", [0, 0, 1]),
        ("-N2 --ntasks-per-node=2 -m cyclic", [0, 1, 0, 1]),
        ("-N2 -n3 -m plane=1", [0, 1, 0]),
        ("-N1 -n2 -w n2", [0, 0]),
        ("-N2 --ntasks-per-node=2 --mpi=pmi2", [0, 0, 1, 1]),
        ("-N2 --ntasks-per-node=2 --mpi=pmix", [0, 0, 1, 1]),
    ],
)
def test_srun(cluster: Cluster, options: str, nodes: list[int], tmp_path: Path) -> None:
    found = worlds(cluster.run, f"srun {options}", tmp_path)
    count = max(nodes) + 1
    expected = [
        (rank, len(nodes), nodes[:rank].count(node), nodes.count(node), node, count) for rank, node in enumerate(nodes)
    ]
    assert rows(found) == expected
    ((launcher, addr, port),) = places(found)
    assert (launcher, addr) == ("slurm", "n1" if count > 1 else "127.0.0.1")
    assert port > 0


@pytest.mark.parametrize("launcher", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpiexec.mpich"])
def test_mpi_on_this_machine(launcher: str, tmp_path: Path) -> None:
    need_tool(launcher.split(maxsplit=1)[0])
    found = worlds(run_command, f"{launcher} -n 3", tmp_path)
    assert rows(found) == [(rank, 3, rank, 3, 0, 1) for rank in range(3)]
    ((name, addr, _),) = places(found)
    assert (name, addr) == ("openmpi" if "openmpi" in launcher else "mpich", "127.0.0.1")


@pytest.mark.parametrize("launcher", ["mpirun.openmpi --allow-run-as-root", "mpiexec.mpich -ppn 2"])
def test_mpi_inside_an_allocation(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    need_tool(launcher.split(maxsplit=1)[0])
    found = worlds(cluster.run, f"salloc --quiet -N2 --ntasks-per-node=2 {launcher} -n 4", tmp_path)
    assert [row[:4] for row in rows(found)] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    ((name, addr, _),) = places(found)
    assert (name, addr) == ("openmpi" if "openmpi" in launcher else "mpich", "n1")


def assert_refused(result: Result) -> None:
    """Four tasks were asked for, and this process is none of them."""
    assert result.rc == 2, str(result)
    assert "SLURM_" in result.err
    assert "srun" in result.err
    assert "Traceback" not in result.err


def test_a_shell_of_salloc_is_no_rank(cluster: Cluster) -> None:
    assert_refused(cluster.run(["salloc", "--quiet", "-N2", "-n4", "instep", "world"]))


def test_a_batch_script_is_no_rank(cluster: Cluster, tmp_path: Path) -> None:
    script, done = tmp_path / "job.sh", tmp_path / "rc"
    script.write_text(
        f"#!/bin/sh\ninstep world >{tmp_path}/out 2>{tmp_path}/err\necho $? >{done}.part\nmv {done}.part {done}\n"
    )
    cluster.run(["sbatch", "-N2", "-n4", "-o", "/dev/null", script]).ok()
    deadline = time.monotonic() + 20
    while not done.exists():
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.05)
    assert done.read_text().strip() == "2"
    assert "srun" in (tmp_path / "err").read_text()


@pytest.fixture(scope="module")
def interactive(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose salloc opens its shell in a step of its own on the first node."""
    assert cluster  # where there is no Slurm, the reason has been said
    with slurm.cluster(extra="LaunchParameters=use_interactive_step") as made:
        yield made


def test_the_interactive_step_of_salloc_is_no_rank(interactive: Cluster, tmp_path: Path) -> None:
    result = interactive.run(["salloc", "--quiet", "-N2", "-n4"], stdin="instep world\necho code $?\n")
    assert "code 2" in result.out, str(result)
    allocate = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2"]
    found = worlds(lambda argv: interactive.run(allocate, stdin=shlex.join(argv)), "srun", tmp_path)
    assert rows(found) == [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "a[01-03,07],b5-ib",
        "rack[0-1]node[1-2]",
        "n[3,1-2]",
        "b5,a[1-2]",
        "n[1-2],n[5-6]",
        "a[1-3],b,c[09-11]",
        "n[001-003]",
        "n[1-2]-ib[0-1]",
        "n1,n1",
        "n[2-2]",
        "x[9-11]",
        "x[09-11]",
        "a[1-2]b[3-4]c[5-6]",
        "n1,",
    ],
)
def test_node_lists_as_slurm_reads_them(cluster: Cluster, text: str) -> None:
    # Where several brackets stand in one name, this version of Slurm lets the middle one turn slowest: compare sets.
    said = cluster.run(["scontrol", "show", "hostnames", text]).ok().out.split()
    got = expand(text)
    assert (sorted(got), got[0]) == (sorted(said), said[0])
    if text.count("[") <= 2:
        assert got == said


@pytest.mark.parametrize("text", ["n[3-1]", "n[a]", "n[]", "n[1-2]]", "n[-2]", ""])
def test_what_slurm_refuses_is_refused(cluster: Cluster, text: str) -> None:
    assert cluster.run(["scontrol", "show", "hostnames", text]).out == ""
    with pytest.raises(WorldError):
        expand(text)
