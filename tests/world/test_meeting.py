"""Where the ranks meet: URLs, ports, who holds one."""

from __future__ import annotations

import os
import socket

import pytest

from instep.errors import JoinError, WorldError
from instep.world import ports, resolve
from instep.world.meeting import is_loopback
from tests.world.test_resolve import OPENMPI_2X2, STEP_2X2


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("tcp://10.0.0.1", "no port"),
        ("tcp://10.0.0.1:", "no port"),
        ("tcp://:29511", "no host"),
        ("tcp://10.0.0.1:x", "Port could not be cast"),
        ("tcp://10.0.0.1:70000", "out of range"),
        ("udp://10.0.0.1:1", "begins with none of"),
        ("10.0.0.1:29511", "begins with none of"),
        ("file://relative/path", "absolute path"),
        ("", "begins with none of"),
    ],
)
def test_bad_urls(url: str, shown: str) -> None:
    with pytest.raises(JoinError) as caught:
        resolve({}, rank=0, world_size=2, init_method=url)
    assert shown in str(caught.value)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "addr", "port"),
    [("tcp://10.0.0.1:29511", "10.0.0.1", 29511), ("tcp://[fd00::1]:29511", "fd00::1", 29511), ("file:///a/b", "", 0)],
)
def test_urls(url: str, addr: str, port: int) -> None:
    world = resolve({}, rank=1, world_size=2, init_method=url)
    assert (world.master_addr, world.master_port, world.init_method) == (addr, port, url)


def test_a_loopback_url_is_refused_for_several_nodes() -> None:
    with pytest.raises(WorldError, match="every machine's name for itself"):
        resolve(STEP_2X2, init_method="tcp://127.0.0.1:29511")


def test_loopback_names() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost", "localhost.localdomain"]))
    assert not any(map(is_loopback, ["10.0.0.1", "n1", "fd00::1", "1270.0.0.1"]))


class TestPort:
    def test_all_ranks_of_a_job_derive_the_same(self) -> None:
        places = [
            {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
            for rank in range(4)
        ]
        ranks = [resolve(STEP_2X2 | place) for place in places]
        assert len({world.master_port for world in ranks}) == 1

    def test_other_jobs_steps_and_restarts_have_others(self) -> None:
        changes: tuple[dict[str, str], ...] = (
            {},
            {"SLURM_JOB_ID": "8"},
            {"SLURM_STEP_ID": "1"},
            {"SLURM_RESTART_COUNT": "1"},
        )
        assert len({resolve(STEP_2X2 | change).master_port for change in changes}) == len(changes)

    def test_given_port_wins(self) -> None:
        env = OPENMPI_2X2 | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345"}
        assert resolve(env).master_port == 12345

    @pytest.mark.parametrize(
        "ephemeral", [(32768, 60999), (15000, 65000), (10000, 30000), (1024, 64000), (20000, 20001)]
    )
    def test_outside_the_ephemeral_range(self, ephemeral: tuple[int, int]) -> None:
        first, last = ephemeral
        derived = {ports.derive(f"job {number}", ephemeral) for number in range(2000)}
        assert all(1024 <= port <= 65535 and not first <= port <= last for port in derived)
        assert len(derived) > 200

    def test_no_room_left(self) -> None:
        assert 1024 <= ports.derive("x", (1024, 65535)) <= 65535

    def test_who_holds_it(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.listen()
            port = held.getsockname()[1]
            assert not ports.is_free(port)
            assert f"pid {os.getpid()}" in ports.holder(port)
        assert ports.is_free(port)
