"""The commands of ``--dry-run``, typed on each of three machines: torchrun, torch.distributed.launch, mpirun, sbatch."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from instep.launch import mpi, render
from instep.launch.plan import Request, Site, make_plan
from instep.launch.preflight.facts import interfaces, machine_of
from instep.launch.target import Target
from tests.commands import run_command
from tests.launch.preflight.agents import COMMAND, meet, started
from tests.needs import need_tool

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox

pytestmark = pytest.mark.real
PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.zeros(dist.get_world_size(), dtype=torch.int64)
total[dist.get_rank()] = 1 + dist.get_rank()
dist.all_reduce(total)
print("sums", *total.tolist(), *sys.argv[1:])
dist.destroy_process_group()
"""


@pytest.fixture
def made(sandbox: Sandbox) -> render.Setup:
    """A plan of four ranks on the three machines."""
    folder = sandbox.folder()
    (folder / "sums.py").write_text(PROGRAM)
    ssh = ["ssh", "-F", str(sandbox.ssh_config)]
    with started({node: [*ssh, node, shlex.join(COMMAND)] for node in sandbox.nodes}) as members:
        meeting, port, _, found = meet(members)
        members[0].ask("release")
    sites = [
        Site(node, machine_of(facts), count, *way)
        for node, facts, count, way in zip(sandbox.nodes, found, (2, 1, 1), meeting.ways, strict=True)
    ]
    plan = make_plan(Request(Target("script", "sums.py", ("a b", "$x")), device="cpu"), sites, {})
    network = mpi.Network(f"{meeting.address}/24", meeting.ways[0][1], sandbox.ssh_config)
    return render.Setup(plan, sys.executable, str(folder), port, {}, network=network, is_root=True)


def typed(sandbox: Sandbox, texts: dict[str, list[str]], *, limit_s: float = 60) -> dict[str, list[str]]:
    """What is said on each machine when these lines are typed on all of them at once."""
    said: dict[str, list[str]] = {}

    def type_on(node: str) -> None:
        argv = ["ssh", "-F", str(sandbox.ssh_config), node, "bash"]
        result = run_command(argv, stdin="\n".join([*texts[node], ""]), limit_s=limit_s).ok()
        said[node] = sorted(line for line in result.out.splitlines() if line.startswith("sums"))

    threads = [threading.Thread(target=type_on, args=(node,)) for node in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == sorted(texts), "a command failed: see above"
    return said


SUMS = "sums 1 2 3 4 a b $x"


@pytest.mark.parametrize("name", ["torchrun", "torchrun, elastic", "torch.distributed.launch"])
def test_typed_on_each_machine(sandbox: Sandbox, made: render.Setup, name: str) -> None:
    (way,) = [way for way in render.ways(made, least=3) if way.name == name]
    said = typed(sandbox, {command.host: command.lines() for command in way.commands})
    assert said == {"n1": [SUMS] * 2, "n2": [SUMS], "n3": [SUMS]}


def test_mpirun_typed_on_the_head(sandbox: Sandbox, made: render.Setup) -> None:
    flavour = dataclasses.replace(mpi.OPENMPI_4, program="mpirun.openmpi")
    way = render.mpirun(dataclasses.replace(made, head="n1"), flavour)
    assert typed(sandbox, {"n1": way.lines()}) == {"n1": [SUMS] * 4}


def test_mpiexec_typed_here(sandbox: Sandbox, made: render.Setup) -> None:
    """On none of the machines: they are reached by the ssh configuration of the inventory."""
    need_tool("mpiexec.mpich")
    here = next(name for name, address, _ in interfaces() if address.startswith(f"{network_of(made)}."))
    network = dataclasses.replace(made.network, interface=here)
    flavour = dataclasses.replace(mpi.MPICH_4, program="mpiexec.mpich")
    way = render.mpirun(dataclasses.replace(made, network=network), flavour)
    said = run_command(["bash"], stdin="\n".join(way.lines()), limit_s=60).ok().out
    assert sorted(said.split("\n"))[-4:] == [SUMS] * 4


def network_of(made: render.Setup) -> str:
    return made.plan.master_addr.rpartition(".")[0]


def test_the_file_for_sbatch(sandbox: Sandbox, made: render.Setup) -> None:
    way = render.sbatch(dataclasses.replace(made, head="n1"))
    argv = ["ssh", "-F", str(sandbox.ssh_config), "n1", "bash"]
    said = run_command(argv, stdin="\n".join(way.lines()), limit_s=30).ok().out
    assert re.fullmatch(r"Submitted batch job \d+\n", said)
