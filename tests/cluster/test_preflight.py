"""What is wrong on one machine is said before anything starts: one table, exit code 2, no run folder."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import instep
from tests import faults
from tests.cluster.ssh_jobs import options
from tests.launch.jobs import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.machines import Sandbox
    from tests.commands import Result

pytestmark = pytest.mark.real
# Needs no torch: says who it is.
HELLO = """
import os
import helper
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], helper.WORD)
"""


@pytest.fixture
def place(sandbox: Sandbox) -> Place:
    """A folder that all machines share."""
    return filled(sandbox.folder())


@pytest.fixture
def lonely() -> Iterator[Place]:
    """A folder that no machine has but this one: containers have a /tmp of their own, empty at first."""
    path = Path("/tmp", f"instep-lonely-{uuid.uuid4().hex[:8]}")
    path.mkdir()
    try:
        yield filled(path)
    finally:
        shutil.rmtree(path)


def filled(path: Path) -> Place:
    place = Place(path, torch=False)
    place.write("hello.py", HELLO)
    place.write("helper.py", "WORD = 'one'\n")
    return place


@contextmanager
def over(sandbox: Sandbox, node: str, source: Path, target: Path) -> Iterator[None]:
    """On one machine another file in the place of this one."""
    sandbox.exec(node, ["mount", "--bind", source, target]).ok()
    try:
        yield
    finally:
        sandbox.exec(node, ["umount", target]).ok()


def refused(result: Result, place: Place, what: str = "") -> str:
    """The error; nothing was started, and nothing is left. With `what` was done it comes into the table of faults."""
    if what:
        faults.note(what, result.seconds, result.rc, result.err)
    assert result.rc == 2, str(result)
    assert result.out == ""
    assert "Traceback" not in result.err
    assert not (place.path / "runs").exists()
    assert result.seconds < 10
    return result.err


def row(err: str, name: str) -> list[str]:
    """The cells of one line of the table."""
    (line,) = [line for line in err.splitlines() if line.strip().startswith(f"{name} ")]
    return re.split(r"  +", line.strip())[1:]


# ---- versions


def test_another_torch_on_one_machine(sandbox: Sandbox, place: Place) -> None:
    import torch

    (metadata,) = Path(torch.__file__).parents[1].glob("torch-*.dist-info/METADATA")
    other = place.path / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*$", "Version: 2.12.0", metadata.read_text(), count=1))
    with over(sandbox, "n2", other, metadata):
        err = refused(place.run(*options(sandbox), "hello.py"), place, "another torch on one machine")
        assert refused(place.run(*options(sandbox), "--dry-run", "hello.py"), place) == err
    assert row(err, "torch") == [torch.__version__, "2.12.0 ✗", torch.__version__]
    assert "on n2:" in err
    assert "pip install torch==" in err


def test_another_instep_on_one_machine(sandbox: Sandbox, place: Place) -> None:
    file = Path(instep.__file__).parent / "errors.py"
    other = place.path / "errors.py"
    other.write_text(file.read_text() + "# another\n")
    with over(sandbox, "n3", other, file):
        err = refused(place.run(*options(sandbox), "hello.py"), place)
    assert "instep" in err
    assert "n3" in err
    assert "→" in err


# ---- the folder


def test_a_folder_that_is_not_shared(sandbox: Sandbox, lonely: Place) -> None:
    err = refused(lonely.run(*options(sandbox), "hello.py"), lonely, "script and folder missing on the others")
    assert row(err, "folder") == ["missing ✗"] * 3
    assert row(err, "script") == ["missing ✗"] * 3
    assert row(err, "runs folder") == ["not shared ✗"] * 3
    assert "--sync" in err
    assert "--own-copies" in err


def test_copying_it(sandbox: Sandbox, lonely: Place) -> None:
    """--sync, the same again, a change, and then --own-copies."""
    words = [*options(sandbox), "--show", "all", "--name"]
    listed = lonely.run(*options(sandbox), "--sync", "--dry-run", "hello.py").ok()
    assert "--sync: 3 files would be copied to n2\n  hello.py\n  helper.py\n" in listed.out
    first = lonely.run(*words, "first", "--sync", "hello.py").ok()
    assert "--sync: copied to n3: hello.py, helper.py" in first.err
    assert sorted(first.out.splitlines()) == [f"[rank {n} on n{n + 1}] rank {n} of 3 one" for n in range(3)]
    lonely.write("helper.py", "WORD = 'another'\n")
    again = lonely.run(*words, "again", "--sync", "hello.py").ok()
    assert "--sync: copied to n1: helper.py\n" in again.err
    assert again.out.count("another") == 3
    assert lonely.run(*words, "own", "--own-copies", "hello.py").ok().out.count("another") == 3
    lonely.write("helper.py", "WORD = 'here only'\n")
    result = lonely.run(*words, "other", "--own-copies", "hello.py")
    assert row(result.err, "code") == ["1 differ ✗"] * 3


def test_own_copies_that_differ(sandbox: Sandbox, lonely: Place) -> None:
    lonely.run(*options(sandbox), "--sync", "--name", "first", "hello.py").ok()
    sandbox.exec("n2", ["sh", "-c", "echo 'WORD = 2' > helper.py"], cwd=lonely.path).ok()
    result = lonely.run(*options(sandbox), "--own-copies", "--name", "second", "hello.py")
    assert result.rc == 2
    assert row(result.err, "code") == ["as here", "1 differ ✗", "as here"]
    assert "helper.py" in result.err
    sandbox.exec("n2", ["rm", "hello.py"], cwd=lonely.path).ok()
    result = lonely.run(*options(sandbox), "--own-copies", "--name", "second", "hello.py")
    assert row(result.err, "script")[1] == "missing ✗"
    assert f"on n2 there is no {lonely.path}/hello.py" in result.err
    assert not (lonely.path / "runs/second").exists()


def test_a_copy_that_cannot_be_made(sandbox: Sandbox, lonely: Place) -> None:
    """No room on one machine, then no rsync, then a folder that may not be written."""
    (lonely.path / "data.bin").write_bytes(bytes(1 << 20))
    sandbox.exec("n2", ["mkdir", lonely.path], cwd="/").ok()
    sandbox.exec("n2", ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", lonely.path], cwd="/").ok()
    err = refused(lonely.run(*options(sandbox), "--sync", "hello.py"), lonely)
    assert f"--sync: {lonely.path} could not be copied to n2" in err
    assert "No space left on device" in err or "is the disk full?" in err
    sandbox.exec("n2", ["mount", "-o", "remount,ro", lonely.path], cwd="/").ok()
    assert "Read-only file system" in refused(lonely.run(*options(sandbox), "--sync", "hello.py"), lonely)
    sandbox.exec("n2", ["umount", lonely.path], cwd="/").ok()
    sandbox.exec("n2", ["mv", "/usr/bin/rsync", "/usr/bin/rsync.not"], cwd="/").ok()
    try:
        err = refused(lonely.run(*options(sandbox), "--sync", "hello.py"), lonely)
    finally:
        sandbox.exec("n2", ["mv", "/usr/bin/rsync.not", "/usr/bin/rsync"], cwd="/").ok()
    assert "rsync is missing on n2; there:  sudo apt-get install rsync" in err


@pytest.mark.parametrize("words", [["--sync"], ["--own-copies"]])
def test_copies_where_there_are_no_machines(place: Place, words: list[str]) -> None:
    err = refused(place.run(*words, "hello.py"), place)
    assert f"{words[0]} is for several machines" in err


# ---- the network


def meeting_of(result: Result) -> dict[str, Any]:
    values = json.loads(result.ok().out)
    return {
        "master": values["master_addr"],
        "ways": [(node["address"], node["interface"]) for node in values["nodes"]],
    }


def test_names_on_the_loopback_and_a_bridge_that_all_have(sandbox: Sandbox, place: Place) -> None:
    """As on a stock Debian with docker: the own name means 127.0.1.1, and 172.17.0.1 is everywhere."""
    bridge = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    for node in sandbox.nodes:
        sandbox.exec(node, ["sh", "-c", f"cp /etc/hosts /etc/hosts.was && {bridge}"], cwd="/").ok()
        sandbox.exec(node, ["sed", "-i", rf"s/^[0-9.]*\s\+{node}$/127.0.1.1 {node}/", "/etc/hosts"], cwd="/").ok()
    try:
        assert sandbox.exec("n1", ["getent", "hosts", "n1"]).ok().out.startswith("127.0.1.1")
        found = meeting_of(place.run(*options(sandbox), "--dry-run", "--json", "hello.py"))
        result = place.run(*options(sandbox), "hello.py").ok()
        faults.note("name on 127.0.1.1, docker0 on all", result.seconds, result.rc, result.err)
    finally:
        for node in sandbox.nodes:
            sandbox.exec(node, ["sh", "-c", "cat /etc/hosts.was > /etc/hosts; ip link del docker0"], cwd="/").ok()
    network = found["master"].rpartition(".")[0]
    assert network.startswith("10.77.")
    assert found["ways"] == [(f"{network}.{number}", "eth0") for number in (1, 2, 3)]


def test_a_firewall_before_the_first_machine(sandbox: Sandbox, place: Place) -> None:
    chain = "{ type filter hook input priority 0 ; }"
    rules = f"nft add table inet t; nft 'add chain inet t c {chain}'; nft add rule inet t c tcp dport 20000-29499 drop"
    sandbox.exec("n1", ["sh", "-ec", rules], cwd="/").ok()
    try:
        err = refused(place.run(*options(sandbox), "hello.py"), place, "a firewall before the first machine")
    finally:
        sandbox.exec("n1", ["nft", "delete", "table", "inet", "t"], cwd="/").ok()
    assert "the machines do not all reach n1, where the ranks were to meet" in err
    assert row(err, "n3") == ["no answer"]
    assert "nft list ruleset" in err


def test_one_machine_under_two_names(sandbox: Sandbox, place: Place) -> None:
    config, inventory = place.path / "config", place.path / "inventory.toml"
    known = sandbox.ssh_config.read_text()
    (n1,) = re.findall(r"(?ms)^Host n1$.*?(?=^Host |\Z)", known)
    config.write_text(known + "\n" + n1.replace("Host n1", "Host twin"))
    inventory.write_text('ssh_config = "config"\n[[machines]]\nname = "n1"\n[[machines]]\nname = "twin"\n')
    err = refused(place.run("--inventory", inventory, "hello.py"), place)
    assert "n1 and twin are the same machine" in err
    assert "--hosts n1:N" in err
