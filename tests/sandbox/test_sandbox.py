"""The practice cluster, for real: machines that answer, see the same folders, and lose network or power."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.cluster import machines
from tests.commands import run_command
from tests.sandbox.traces import traces

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox

# Talks with a server, and says how that ends.
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
try:
    peer.sendall(b"x")
    print("first", peer.recv(1).decode(), flush=True)
    while True:
        peer.sendall(b"x")
        if not peer.recv(1):
            print("closed")
            break
except OSError as error:
    print(type(error).__name__)
"""
SERVER = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
open("ready", "w").close()
peer = server.accept()[0]
while True:
    peer.sendall(peer.recv(1))
    time.sleep(0.02)
"""


def wait_for(path: Path, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.01)


def address(sandbox: Sandbox, node: str) -> str:
    return next(str(one["address"]) for one in sandbox.status()["machines"] if one["name"] == node)


def test_machines_answer_by_ssh_and_know_each_other(sandbox: Sandbox) -> None:
    for node in sandbox.nodes:
        others = " ".join(other for other in sandbox.nodes if other != node)
        done = run_command(
            [
                *("ssh", "-F", sandbox.ssh_config, node),
                f"hostname; cat /etc/os-release; for other in {others}; do ssh $other hostname; done",
            ]
        ).ok()
        words = done.out.split()
        assert words[0] == node
        assert words[-2:] == others.split()
        assert "ID=debian" in words


def test_systemd_is_content(sandbox: Sandbox) -> None:
    for node in sandbox.nodes:
        done = sandbox.exec(node, ["systemctl", "is-system-running", "--wait"])
        failed = sandbox.exec(node, ["systemctl", "--failed", "--no-pager"]).out
        assert done.out.strip() == "running", f"{done}\n{failed}"


def test_launchers_reach_all(sandbox: Sandbox) -> None:
    hosts = ",".join(sandbox.nodes)
    for argv in (
        ["srun", "-N3", "hostname"],
        ["mpirun.openmpi", "--allow-run-as-root", "-np", "3", "-H", hosts, "--map-by", "node", "hostname"],
        ["mpiexec.mpich", "-n", "3", "-hosts", hosts, "hostname"],
    ):
        assert sorted(sandbox.exec("n1", argv).ok().out.split()) == ["n1", "n2", "n3"], argv[0]


def test_all_see_the_same_folders(sandbox: Sandbox) -> None:
    folder = sandbox.folder()
    shared = sandbox.inventory.parent / "shared"
    sandbox.exec("n1", ["sh", "-c", f"echo one > one; echo two > /shared/two; pwd; cat {shared}/two"], cwd=folder).ok()
    assert (folder / "one").read_text() == "one\n"
    assert (shared / "two").read_text() == "two\n"
    seen = sandbox.exec("n2", ["cat", folder / "one", "/shared/two"]).ok()
    assert seen.out == "one\ntwo\n"


def test_the_same_python_runs_there(sandbox: Sandbox) -> None:
    script = "import sys, numpy, instep; print(sys.executable, sys.version, numpy.__version__)"
    here = run_command([sys.executable, "-c", script]).ok().out
    assert sandbox.exec("n3", [sys.executable, "-c", script]).ok().out == here


def test_exit_codes_and_input_come_through(sandbox: Sandbox) -> None:
    assert sandbox.exec("n1", ["sh", "-c", "exit 7"]).rc == 7
    assert sandbox.exec("n1", ["cat"], stdin="words").ok().out == "words"
    assert sandbox.tool("ssh", "n1", "exit 9").rc == 9
    assert sandbox.tool("ssh", "n1", "printf", "%s.", "a b", "$HOME").ok().out == "a b.$HOME."
    assert sandbox.tool("exec", "n1", "printf", "%s.", "--name", "-x", "--").ok().out == "--name.-x.--."


@pytest.mark.parametrize(("how", "port"), [("cut", 9000), ("kill", 9001)])
def test_a_machine_that_is_lost_says_nothing(sandbox: Sandbox, how: str, port: int) -> None:
    """No FIN, no RST: a peer waits, as it would if a cable were pulled."""
    folder = sandbox.folder()
    (folder / "client.py").write_text(CLIENT)
    (folder / "server.py").write_text(SERVER)
    sandbox.exec("n2", ["sh", "-c", "echo kept > /root/disk; sync"]).ok()
    start = ["systemd-run", "--quiet", f"--working-directory={folder}", "sh", "-c"]
    sandbox.exec("n2", [*start, f"exec python3 server.py {port}"]).ok()
    wait_for(folder / "ready")
    client = f"python3 -u client.py {address(sandbox, 'n2')} {port} > said; touch done"
    sandbox.exec("n1", [*start, client]).ok()
    deadline = time.monotonic() + 10
    while "first" not in ((folder / "said").read_text() if (folder / "said").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    {"cut": sandbox.cut, "kill": sandbox.kill}[how]("n2")
    assert sandbox.exec("n1", ["ping", "-c1", "-W1", "n2"]).rc == 1
    assert sandbox.exec("n1", ["ping", "-c1", "-W1", "n3"]).rc == 0
    state = next(one for one in sandbox.status()["machines"] if one["name"] == "n2")
    assert (state["power"], state["cut"], state["ssh"]) == (how == "cut", how == "cut", False)
    wait_for(folder / "done")
    assert (folder / "said").read_text().split() == ["first", "x", "TimeoutError"]
    if how == "cut":
        assert sandbox.exec("n2", ["ping", "-c1", "-W1", "n1"]).rc == 1
        sandbox.heal("n2")
    else:
        refused = sandbox.tool("exec", "n2", "true")
        assert (refused.rc, "n2 is off" in refused.err) == (2, True)
        sandbox.start("n2")
    assert sandbox.exec("n1", ["ssh", "n2", "cat", "/root/disk"]).ok().out == "kept\n"


def test_slurm_takes_a_machine_back(sandbox: Sandbox) -> None:
    sandbox.kill("n3")
    sandbox.start("n3")
    deadline = time.monotonic() + 30
    while sandbox.exec("n1", ["sinfo", "-hN", "-p", "train", "-o", "%T"]).ok().out.split() != ["idle"] * 3:
        assert time.monotonic() < deadline, sandbox.exec("n1", ["sinfo", "-lN"]).out
        time.sleep(0.2)
    assert sandbox.exec("n1", ["srun", "-N3", "true"], limit_s=30).rc == 0


def test_a_second_one_beside_it(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other network, other user, and the traps that can be rehearsed."""
    monkeypatch.setenv("SUDO_UID", "65534")  # nobody
    options = ["--loopback-names", "--docker", "--disk", "20mb", "--net", "80mbit", "--no-slurm"]
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith("pytest"):
            folder.chmod(0o755)
    with machines.sandbox(tmp_path, *options, nodes=2) as other:
        assert address(other, "n1") != address(sandbox, "n1")
        assert other.exec("n1", ["ping", "-c1", "-W1", address(sandbox, "n1")]).rc != 0
        assert other.status()["user"] == "nobody"
        own_key = other.inventory.parent / "id_ed25519"
        assert (own_key.stat().st_uid, own_key.stat().st_mode & 0o777) == (65534, 0o600)
        login = ["ssh", "-F", str(other.ssh_config), "n1"]
        done = run_command([*login, f"id -un; touch {tmp_path}/mine; ssh n2 id -un; getent ahostsv4 n1 n2"]).ok()
        words = done.out.split()
        assert words[:2] == ["nobody", "nobody"]
        assert {"127.0.1.1", address(other, "n2")} <= set(words)
        assert (tmp_path / "mine").stat().st_uid == 65534
        assert other.tool("exec", "--user", "nobody", "n2", "id", "-un").ok().out == "nobody\n"
        assert "no user 'eve'" in other.tool("exec", "--user", "eve", "n2", "id").err
        facts = other.exec(
            "n2", ["sh", "-c", "ip -br -4 address; df -k --output=size /scratch; systemctl is-active slurmd"]
        )
        assert "172.17.0.1/16" in facts.out
        assert "20480" in facts.out
        assert "inactive" in facts.out
        before = time.monotonic()
        other.exec("n1", ["sh", "-c", "head -c 5M /dev/zero | ssh n2 'cat >/dev/null'"]).ok()
        assert time.monotonic() - before > 0.4  # 5 MB at 80 Mbit/s are half a second
        name = other.name
    assert traces(name) == []
    assert sandbox.exec("n1", ["ping", "-c1", "-W1", "n2"]).rc == 0


def test_a_host_that_forwards_nothing(tmp_path: Path) -> None:
    """Docker has the host drop what it forwards, and bridges ask the same rules: not ours."""
    needs.need_sandbox()
    name = f"f-{uuid.uuid4().hex[:6]}"
    script = f"""
        ip link set lo up
        nft add table ip firewall
        nft add chain ip firewall forward '{{ type filter hook forward priority 0; policy drop; }}'
        {machines.INSTEP} sandbox up --name {name} --nodes 2 --no-slurm --share {tmp_path}
        {machines.INSTEP} sandbox exec --name {name} n1 ssh n2 hostname
        {machines.INSTEP} sandbox down --name {name}
    """
    done = run_command(["unshare", "--net", "sh", "-c", script], limit_s=600).ok()
    assert done.out.splitlines()[-1] == "n2"
    assert traces(name) == []


def test_a_name_that_is_taken(sandbox: Sandbox) -> None:
    done = sandbox.tool("up")
    assert done.rc == 2
    assert f"there is a sandbox {sandbox.name} already" in done.err
    assert f"instep sandbox down --name {sandbox.name}" in done.err
    assert sandbox.exec("n1", ["true"]).rc == 0


def test_a_machine_that_is_not_there(sandbox: Sandbox) -> None:
    for verb, *rest in (("cut",), ("heal",), ("kill",), ("start",), ("exec", "true"), ("ssh", "true")):
        done = sandbox.tool(verb, "n9", *rest)
        assert done.rc == 2, done
        assert "has no machine 'n9'" in done.err
        assert "one of: n1, n2, n3" in done.err


def test_start_of_a_machine_that_is_on(sandbox: Sandbox) -> None:
    done = sandbox.tool("start", "n1")
    assert (done.rc, "n1 is on" in done.err) == (2, True)


def test_a_plan_makes_nothing() -> None:
    needs.need_sandbox()
    name = f"p-{uuid.uuid4().hex[:6]}"
    words = ["sandbox", "up", "--name", name, "--nodes", "5", "--dry-run"]
    done = run_command([machines.INSTEP, *words]).ok()
    assert "n5 10.77." in done.out
    assert f"{Path.cwd()} (rw)" in done.out
    plan = json.loads(run_command([machines.INSTEP, *words, "--json"]).ok().out)
    assert len(plan["machines"]) == 5
    assert traces(name) == []
