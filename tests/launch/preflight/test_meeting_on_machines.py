"""Machines with awkward networks really listen and connect; then ranks really meet where the preflight says."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from instep.errors import RunError
from tests.launch.preflight.agents import agents, meet, together
from tests.needs import need_namespaces, need_tool
from tests.real.hosts import DOCKER_ADDR, hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.launch.preflight.meeting import Meeting
    from tests.launch.preflight.agents import Agent
    from tests.real.hosts import Host

pytestmark = pytest.mark.real
RANKS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(int(total))
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _needs() -> None:
    need_namespaces()


def root(machine: Host, *commands: str) -> None:
    for command in commands:
        machine.run(["sh", "-c", command], limit_s=10).ok()


def start_ranks(machines: Sequence[Host], meeting: Meeting, port: int) -> list[str]:
    """One rank on each, told as the plan tells them."""
    printed = [""] * len(machines)

    def run(rank: int) -> None:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(machines)),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": meeting.ways[rank][1],
        }
        printed[rank] = str(machines[rank].run([sys.executable, "-c", RANKS], env=env, limit_s=40).ok().out.strip())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return printed


def test_a_docker_bridge_and_names_on_the_loopback() -> None:
    """And the port: rank 0 listens on it while it is kept for it."""
    with hosts(["n1", "n2", "n3"], docker=True, loopback_name=True) as machines, agents(machines) as members:
        meeting, port, reached, _ = meet(members)
        assert meeting.address == "10.88.0.1"
        assert meeting.ways == (("10.88.0.1", "eth0"), ("10.88.0.2", "eth0"), ("10.88.0.3", "eth0"))
        assert [one["n1"][DOCKER_ADDR].get("why") for one in reached[1:]] == ["refused", "refused"]
        members[0].ask("release")
        assert start_ranks(machines, meeting, port) == ["6", "6", "6"]


def test_the_kept_port_is_taken_for_others() -> None:
    """Two jobs of one key on one main machine: the second takes the next port, until the first gives it up."""
    with hosts(["n1", "n2"]) as machines, agents(machines) as first, agents(machines) as second:
        one, port, *_ = meet(first, key="4711")
        first[0].ask("release")
        other, next_port, *_ = meet(second, key="4711")
        assert (one.address, other.address, next_port) == ("10.88.0.1", "10.88.0.1", port + 1)
    with hosts(["n1", "n2"]) as machines, agents(machines) as again:
        assert meet(again, key="4711")[1] == port


def test_a_port_that_a_server_has() -> None:
    with hosts(["n1", "n2"]) as machines, agents(machines) as members:
        serve = "import socket, time; s = socket.create_server(('', 20000)); print('up', flush=True); time.sleep(50)"
        server = subprocess.Popen(machines[0].argv([sys.executable, "-c", serve]), stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server, server.stdout:
            assert server.stdout.readline() == b"up\n"
            assert meet(members, ports=(20_000, 20_001))[1] == 20_001
            server.kill()


def test_no_port_left() -> None:
    with hosts(["n1"]) as machines, agents(machines):
        code = (
            "import socket\nfrom instep.errors import RunError\nfrom instep.launch.preflight.meeting import Listener\n"
            "s = socket.create_server(('', 20000))\n"
            "try:\n    Listener('x', ports=(20000, 20000), key='y')\nexcept RunError as error:\n    print(error)\n"
        )
        said = machines[0].run([sys.executable, "-c", code], limit_s=20).ok().out
    assert said == "no free TCP port from 20000 to 20000 on n1\n  → see who holds them:  ss -ltn\n"


def test_a_second_network_where_the_first_does_not_lead_everywhere() -> None:
    with hosts(["n1", "n2", "n3"], second_nic=True, docker=True) as machines, agents(machines) as members:
        root(
            machines[1],
            "ip link set eth0 down",
            "ip link set eth1 down",
            "ip link set eth1 name ib0",
            "ip link set ib0 up",
        )
        meeting, _, reached, _ = meet(members)
        assert meeting.address == "10.99.0.1"
        assert meeting.ways == (("10.99.0.1", "eth1"), ("10.99.0.2", "ib0"), ("10.99.0.3", "eth1"))
        assert reached[1]["n1"]["10.88.0.1"] == {"why": "no route"}


def test_an_address_that_never_answers_costs_no_time() -> None:
    """Once the main machine has answered at one address: a storage network that only it has, say."""
    with hosts(["n1", "n2"], second_nic=True) as machines, agents(machines) as members:
        firewall(machines[0], "ip daddr 10.88.0.1 drop")
        begin = time.monotonic()
        meeting, _, reached, _ = meet(members)
        seconds = time.monotonic() - begin
    assert meeting.ways == (("10.99.0.1", "eth1"), ("10.99.0.2", "eth1"))
    assert reached[1]["n1"]["10.88.0.1"] == {"why": "no answer"}
    assert seconds < 1.5


def test_the_address_that_the_user_has_named() -> None:
    with hosts(["n1", "n2"], second_nic=True) as machines, agents(machines) as members:
        meeting, *_ = meet(members, hint="10.99.0.1")
    assert meeting.ways == (("10.99.0.1", "eth1"), ("10.99.0.2", "eth1"))


def test_ipv6_only() -> None:
    with hosts(["n1", "n2"]) as machines:
        for number, machine in enumerate(machines, 1):
            root(machine, "ip addr flush dev eth0", f"ip addr add fd00:88::{number}/64 dev eth0 nodad")
        with agents(machines) as members:
            meeting, port, *_ = meet(members)
            assert meeting.ways == (("fd00:88::1", "eth0"), ("fd00:88::2", "eth0"))
            members[0].ask("release")
            assert start_ranks(machines, meeting, port) == ["3", "3"]


def test_a_machine_without_ipv6() -> None:
    with hosts(["n1", "n2"]) as machines:
        root(machines[0], "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
        with agents(machines) as members:
            assert meet(members)[0].address == "10.88.0.1"


def firewall(machine: Host, rule: str) -> None:
    """An input rule of nft; it goes with the machine."""
    need_tool("nft")
    chain = "{ type filter hook input priority 0 ; }"
    root(machine, "nft add table inet t", f"nft 'add chain inet t c {chain}'", f"nft 'add rule inet t c {rule}'")


def error_of(members: Sequence[Agent]) -> RunError:
    with pytest.raises(RunError) as caught:
        meet(members)
    return caught.value


def test_a_firewall_before_the_main_machine() -> None:
    with hosts(["n1", "n2", "n3"], docker=True) as machines, agents(machines) as members:
        firewall(machines[0], "ip saddr 10.88.0.3 tcp dport 20000-29499 drop")
        error = error_of(members)
    assert error.what == "the machines do not all reach n1, where the ranks were to meet"
    assert error.evidence == (
        "    10.88.0.1 (eth0)  172.17.0.1 (docker0)",
        "n2  reached           refused",
        "n3  no answer         refused",
    )
    assert "nft list ruleset" in error.cure


def test_a_firewall_between_two_others() -> None:
    with hosts(["n1", "n2", "n3"]) as machines, agents(machines) as members:
        firewall(machines[1], "ip saddr 10.88.0.3 tcp flags & (syn | ack) == syn reject with tcp reset")
        error = error_of(members)
    assert error.what == "all machines reach n1, but not each other"
    assert error.evidence == ("n3 → n2 (10.88.0.2): refused", "n1 is reached at 10.88.0.1")


def test_another_job_at_the_same_address_and_port() -> None:
    """On n2 something listens at the address that n1's bridge has too, on the very port: it is not taken for n1."""
    with hosts(["n1", "n2"], docker=True) as machines, agents(machines) as members, agents(machines) as others:
        together(others[1:], "listen", [{"token": "of another job", "ports": [20_007, 20_007], "key": ""}])
        meeting, _, reached, _ = meet(members, ports=(20_007, 20_007))
    assert meeting.address == "10.88.0.1"
    assert reached[1]["n1"][DOCKER_ADDR] == {"why": "another one answers there"}
