"""The machines that other tests stand on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.needs import need_namespaces
from tests.real.hosts import DOCKER_ADDR, hosts

PING = "import socket, sys; s = socket.create_connection((sys.argv[1], 9000), 5); print(s.recv(9).decode())"
PONG = "import socket; s = socket.create_server(('', 9000)); print('up', flush=True); c, _ = s.accept(); c.send(socket.gethostname().encode())"
DAEMON = ["sleep", "7654.321"]
MACHINE = "boot own[12] /tmp/instep-hosts-"  # other tests have machines at the same time


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


def processes(pattern: str) -> list[str]:
    return subprocess.run(["pgrep", "-af", pattern], capture_output=True, text=True, check=False).stdout.splitlines()


def here() -> tuple[list[str], str, list[str]]:
    """What of this machine must be the same afterwards; a practice cluster of other tests may come and go."""
    addresses = run_command(["ip", "-o", "addr"]).out.splitlines()
    return [line for line in addresses if ": is" not in line], Path("/etc/hosts").read_text(), processes(MACHINE)


def test_they_reach_each_other_by_name_and_leave_nothing() -> None:
    before = here()
    with hosts(["own1", "own2"]) as (one, two):
        with subprocess.Popen(two.argv([sys.executable, "-c", PONG]), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            assert one.run([sys.executable, "-c", PING, "own2"]).ok().out == "own2\n"
        assert one.run(["hostname"]).ok().out == "own1\n"
        assert one.run(["ls", "/sys/class/net"]).ok().out.split() == ["eth0", "lo"]
        # What a machine still runs at the end goes with it, a daemon too.
        subprocess.run(one.argv(["setsid", "--fork", *DAEMON]), check=True)
        assert processes(" ".join(DAEMON))
        assert len(here()[2]) > len(before[2])
    assert here() == before
    assert not processes(" ".join(DAEMON))


def test_a_machine_may_have_traps() -> None:
    with hosts(["n1", "n2"], second_nic=True, docker=True, loopback_name=True) as (n1, n2):
        for host, other in [(n1, n2), (n2, n1)]:
            addrs = host.run(["ip", "-o", "-4", "addr"]).ok().out
            assert DOCKER_ADDR in addrs
            assert host.addr.replace("10.88", "10.99") in addrs
            assert host.run(["getent", "hosts", host.name]).ok().out.split()[0] == "127.0.1.1"
            assert host.run(["getent", "hosts", other.name]).ok().out.split()[0] == other.addr


def test_they_die_with_the_process_that_made_them() -> None:
    code = "from tests.real.hosts import hosts; import os\nwith hosts(['n1']): os.kill(os.getpid(), 9)"
    result = run_command([sys.executable, "-c", code], cwd=Path(__file__).parents[2])  # fails if anything is left
    assert result.rc == -9
