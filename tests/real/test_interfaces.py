"""Two machines with awkward networks: the ranks meet, and gloo uses the interface on the route to the main rank."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.needs import need_namespaces
from tests.real.hosts import hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.commands import Result
    from tests.real.hosts import Host

SCRIPT = """
import json, os, sys, instep
with instep.init(timeout=20) as session:
    world = session.world
    names = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    print(json.dumps({"total": instep.total(session.rank + 1), "node": world.node_rank, "local": world.local_rank,
                      "nodes": world.num_nodes, **names}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    need_namespaces()
    path = tmp_path / "meet.py"
    path.write_text(SCRIPT)
    return path


def start(machines: Sequence[Host], script: Path, env: Mapping[str, str]) -> list[Result]:
    """One rank on each machine, started by hand as the tutorials do."""
    results: dict[int, Result] = {}

    def run(rank: int, machine: Host) -> None:
        here = {"RANK": str(rank), "WORLD_SIZE": str(len(machines)), "MASTER_PORT": "29511", **env}
        results[rank] = machine.run([sys.executable, script], env=here, limit_s=60)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(machines))]


def said(results: Sequence[Result]) -> list[dict[str, Any]]:
    for result in results:
        assert result.rc == 0, result.err
    return [json.loads(result.out) for result in results]


def expected(interface: str, node: int) -> dict[str, Any]:
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {"total": 3, "node": node, "local": 0, "nodes": 2, **names}


def test_own_name_on_loopback_and_a_docker_bridge(script: Path) -> None:
    """A stock Debian's 127.0.1.1, and an interface with the same address on all machines."""
    with hosts(["n1", "n2"], docker=True, loopback_name=True) as machines:
        results = start(machines, script, {"MASTER_ADDR": "n1"})
    assert said(results) == [expected("eth0", 0), expected("eth0", 1)]


def test_the_network_on_which_the_master_is(script: Path) -> None:
    with hosts(["n1", "n2"], second_nic=True, docker=True, loopback_name=True) as machines:
        results = start(machines, script, {"MASTER_ADDR": "10.99.0.1"})
    assert said(results) == [expected("eth1", 0), expected("eth1", 1)]


def test_the_users_own_choice_stays(script: Path) -> None:
    with hosts(["n1", "n2"], second_nic=True) as machines:
        results = start(machines, script, {"MASTER_ADDR": "n1", "GLOO_SOCKET_IFNAME": "eth1"})
    assert [one["GLOO_SOCKET_IFNAME"] for one in said(results)] == ["eth1", "eth1"]


def test_a_master_whose_name_means_oneself(script: Path) -> None:
    """On n2 the name n2 is 127.0.1.1, while rank 0 runs on n1: that rank would wait for itself."""
    with hosts(["n1", "n2"], loopback_name=True) as (_, n2):
        env = {"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "n2"}
        result = n2.run([sys.executable, script], env={**env, "MASTER_PORT": "29511"})
    assert result.rc == 2
    assert "n2 means this machine itself" in result.err
    assert "127.0.1.1" in result.err
    assert result.seconds < 15


def test_a_leftover_port_of_another_process_is_named(script: Path) -> None:
    with hosts(["n1"]) as (n1,):
        code = (
            "import socket, subprocess, sys, os\n"
            "held = socket.socket(); held.bind(('', 29511)); held.listen()\n"
            f"done = subprocess.run([sys.executable, {str(script)!r}])\n"
            "print(os.getpid(), done.returncode)\n"
        )
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29511"}
        result = n1.run([sys.executable, "-c", code], env=env)
    pid, code_of_rank = result.out.split()
    assert code_of_rank == "2"
    assert f"pid {pid}" in result.err
