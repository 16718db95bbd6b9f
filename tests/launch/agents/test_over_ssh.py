"""Ranks on several machines over a real sshd: what they find, what comes back, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import MARKER, marked
from tests.launch.jobs import INSTEP

if TYPE_CHECKING:
    from tests.launch.agents.conftest import Machines
    from tests.launch.jobs import Place

SAY = """
    import json, os, socket, sys
    names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME".split()
    print(socket.gethostname(), *(os.environ.get(name, "-") for name in names), flush=True)
    print("to stderr", file=sys.stderr)
"""


def test_ranks_find_where_they_are(machines: Machines, place: Place) -> None:
    place.write("train.py", SAY)
    result = machines.run(place, "--show", "all", "train.py", slots=2).ok()
    assert sorted(line for line in result.out.splitlines()) == [
        f"[rank {rank} on n{rank // 2 + 1}] n{rank // 2 + 1} {rank} {rank % 2} {rank // 2} 6 2 3 10.88.0.1 eth0"
        for rank in range(6)
    ]
    assert result.err.count("] to stderr\n") == 6
    record = place.record()
    assert (record["via"], record["hosts"], record["world_size"]) == ("ssh", ["n1", "n2", "n3"], 6)
    assert record["ssh_config"] == str(machines.ssh_config)
    assert re.fullmatch(r"10\.88\.0\.1:\d+", record["master"])
    assert place.log(5).startswith("n3 5 1 2 6 2 3 10.88.0.1 eth0\n")


def test_ranks_in_the_order_of_the_list_and_slots_as_said(machines: Machines, place: Place) -> None:
    place.write("train.py", SAY)
    file = place.write("hosts.txt", "n3 slots=1\nn1 slots=2  # two\n")
    config = ["-F", str(machines.ssh_config)]
    ssh = place.write(
        "bin/ssh", f'#!/bin/sh\nexec /usr/bin/ssh {" ".join(config)} "$@"\n'
    )  # as a user's own ~/.ssh/config
    ssh.chmod(0o755)
    argv: list[str | Path] = [INSTEP, "run", "--hostfile", file, "--show", "all", "train.py"]
    result = machines.head.run(argv, cwd=place.path, env={**place.env, "PATH": f"{ssh.parent}:/usr/bin:/bin"}).ok()
    assert sorted(line.split("] ")[1].split()[:2] for line in result.out.splitlines()) == [
        ["n1", "1"],
        ["n1", "2"],
        ["n3", "0"],
    ]


def test_a_failure_elsewhere(machines: Machines, place: Place) -> None:
    place.write("train.py", "import os, time\nif os.environ['RANK'] == '2': raise KeyError('x')\ntime.sleep(600)\n")
    result = machines.run(place, "train.py")
    assert result.rc == 1
    assert result.err.count("✗ rank 2 on n3 failed: KeyError: 'x'\n") == 1
    assert result.err.count("Traceback") == 1
    assert place.record()["first_failure"]["host"] == "n3"
    assert place.record()["exit_codes"] == {"0": 143, "1": 143, "2": 1}


def test_variables(machines: Machines, place: Place) -> None:
    """Those of the launcher and --env arrive, a machine's own stay, and none stands on a command line."""
    place.write("train.py", """
        import json, os, pathlib
        words = b"".join(path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"))
        if os.environ["RANK"] == "1":
            pathlib.Path("found.json").write_text(json.dumps([dict(os.environ), b"s3cr3t" in words, os.getcwd()]))
    """)  # fmt: skip
    env = {"MY_TOKEN": "s3cr3t", "XDG_CACHE_HOME": "/here", "HOME": "/home/of/head"}
    machines.run(
        place, "--env", "MORE=a b='c'", "--env", "XDG_CACHE_HOME", "train.py", names=("n1", "n2"), env=env
    ).ok()
    found, is_told, cwd = json.loads((place.path / "found.json").read_text())
    assert (found["MY_TOKEN"], found["MORE"], found["XDG_CACHE_HOME"]) == ("s3cr3t", "a b='c'", "/here")
    assert found["HOME"] != "/home/of/head"
    assert not is_told
    assert cwd == found["PWD"] == str(place.path)


def test_much_output(machines: Machines, place: Place) -> None:
    place.write("train.py", "import sys\nfor n in range(100_000): print(n, 'x' * 60)\nprint('end', file=sys.stderr)\n")
    machines.run(place, "--show", "all", "train.py", names=("n1", "n2")).ok()
    for rank in (0, 1):
        lines = place.log(rank).splitlines()
        assert len(lines) == 100_001
        assert [line.split()[0] for line in lines if line != "end"] == [str(n) for n in range(100_000)]


def test_a_reader_that_does_not_read(machines: Machines, place: Place) -> None:
    """`instep run ... | less`: the launcher stands in a write, and its machines do not take it for gone."""
    place.write("train.py", "for n in range(20_000): print(n, 'x' * 60)\n")
    file = machines.inventory(place, "n1", "n2")
    argv = machines.head.argv([INSTEP, "run", "--inventory", file, "--show", "all", "train.py"], cwd=place.path)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin", **place.env}
    ) as run:
        try:
            time.sleep(8.5)
            out, err = run.communicate(timeout=30)
        finally:
            run.kill()
    assert run.returncode == 0, err.decode()
    assert out.count(b"\n") == 40_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "the host key of n2 is not known here, so it may be anybody"),
        ("StrictHostKeyChecking accept-new\n    HostName 10.88.0.99\n    ConnectTimeout 2", "n2 does not answer"),
        ("PubkeyAuthentication no", "n2 does not let you in without a password"),
        ("Port 2222", "n2 refuses connections of ssh"),
    ],
    ids=["key unknown", "no such address", "not let in", "refused"],
)
def test_a_machine_that_cannot_be_reached(machines: Machines, place: Place, change: str, said: str) -> None:
    text = machines.ssh_config.read_text()
    if change:
        text = f"Host n2\n    {change}\n{text}"
    else:
        known = (machines.ssh_config.parent / "known_hosts").read_text().splitlines()
        mine = place.write("known_hosts", "\n".join(line for line in known if "n2" not in line) + "\n")
        text = text.replace(f"{machines.ssh_config.parent}/known_hosts", str(mine))
    config = place.write("config", "")
    config.write_text(text)
    place.write("train.py", "open('ran', 'w')\n")
    result = machines.run(place, "train.py", config=config)
    assert result.rc == 2, str(result)
    assert f"✗ {said}" in result.err
    assert "StrictHostKeyChecking" not in result.err
    assert (place.runs, (place.path / "ran").exists()) == ([], False)
    assert result.seconds < 12


def test_no_such_machine(machines: Machines, place: Place) -> None:
    place.write("train.py", "")
    result = machines.run(place, "train.py", names=("n1", "no-such-machine", "nor-this"))
    assert result.rc == 2
    assert "✗ 2 machines cannot take part: no-such-machine, nor-this\n" in result.err
    assert "there is no machine named nor-this" in result.err


def test_a_python_that_is_not_there_or_has_no_instep(machines: Machines, place: Place) -> None:
    place.write("train.py", "")
    result = machines.run(place, "--python", "/opt/none/python", "train.py")
    assert result.rc == 2
    assert "there is no /opt/none/python on n1" in result.err
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if python is None:
        pytest.skip("no other Python here")
    result = machines.run(place, "--python", python, "train.py")
    assert result.rc == 2
    assert re.search(r"the Python on n1 has no instep|the machines are not alike", result.err)


def test_one_machine_by_two_names(machines: Machines, place: Place) -> None:
    place.write("train.py", "open('ran', 'w')\n")
    for names in (("n1", "10.88.0.1"), ("localhost", "head")):
        result = machines.run(place, "train.py", names=names)
        assert result.rc == 2
        assert f"✗ {names[0]} and {names[1]} are the same machine\n" in result.err
    assert not (place.path / "ran").exists()


def test_here_and_there(machines: Machines, place: Place) -> None:
    """The launcher's own machine may be one of them, by any name of its /etc/hosts; it needs no ssh, and has none."""
    place.write("train.py", SAY)
    for name in ("head", "head.example.org"):
        table = "grep -q example /etc/hosts || echo 10.88.0.4 head.example.org >> /etc/hosts"
        machines.head.run(["sh", "-c", table]).ok()
        result = machines.run(place, "--show", "all", "--name", name, "train.py", names=(name, "n2")).ok()
        assert sorted(line.split("] ")[1].split()[0] for line in result.out.splitlines()) == ["head", "n2"]
        assert "10.88.0.4:" in (place.path / "runs" / name / "run.json").read_text()


def test_ctrl_c_while_a_machine_does_not_answer(machines: Machines, place: Place) -> None:
    place.write("train.py", "")
    config = place.write("config", "")
    config.write_text(f"Host n2\n    HostName 10.88.0.99\n{machines.ssh_config.read_text()}")
    with machines.started(place, "train.py", names=("n1", "n2"), config=config) as launcher:
        assert launcher.nsenter.stderr
        assert launcher.nsenter.stderr.readline() == b"\xe2\x80\xa6 waiting for n2: no answer yet\n"
        begin = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(10) == 130
        assert time.monotonic() - begin < 3
    assert place.runs == []


def test_a_dry_run_starts_nothing(machines: Machines, place: Place) -> None:
    place.write("train.py", "open('ran', 'w')\n")
    result = machines.run(place, "--dry-run", "--nodes", "1:2", "train.py").ok()
    assert "10.88.0.1" in result.out
    assert "torchrun" in result.out
    assert not (place.path / "ran").exists()
    assert place.runs == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--via", "ssh", "train.py"], "--via ssh needs machines"),
        (["--hosts", "n1", "--hostfile", "train.py", "train.py"], "machines are named by --hosts and by --hostfile"),
        (["--hosts", "n1,n2", "--via", "local", "train.py"], "--via local runs on this machine alone"),
        (["--hosts", "n1,n2", "--nodes", "3", "train.py"], "--nodes asks for 3 machines at least, and 2 are listed"),
        (["--hosts", "n1,n2", "--nodes", "2:1", "train.py"], "the fewest are more than the most"),
        (["--hosts", "n1,n2", "--nodes", "0", "train.py"], "is no number of machines"),
        (["--hosts", "n1,n2", "--nodes", "x", "train.py"], "is no number of machines"),
        (["--hosts", "n1,n1", "train.py"], "n1"),
        (["--hosts", "n1:0", "train.py"], "slots of n1"),
        (["--hosts", "n1", "--node-wait", "-1", "train.py"], "--node-wait -1 is no time to wait"),
        (["--hosts", "n1", "--env", "1=2", "train.py"], "names no variable"),
        (["--sync", "train.py"], "--sync is for several machines, and none are named"),
        (["--hostfile", "/nowhere", "train.py"], "/nowhere"),
    ],
)
def test_what_is_refused_before_anything_is_started(place: Place, words: list[str], said: str) -> None:
    place.write("train.py", "")
    result = place.run(*words)
    assert result.rc == 2, str(result)
    assert said in result.err
    assert "Traceback" not in result.err
    assert place.runs == []


def test_the_folder_is_not_there(machines: Machines, place: Place) -> None:
    """Something of the head's own mounted over the shared folder: the other machines do not see the script."""
    place.write("train.py", "open('ran', 'w')\n")
    file = machines.inventory(place, "n1", "n2")
    shared = Path("/run") / place.path.name
    command = f"mkdir -p {shared} && mount -t tmpfs tmpfs {shared} && cp {place.path}/train.py {shared} && cd {shared} && exec {INSTEP} run --inventory {file} train.py"
    result = machines.head.run(["unshare", "--mount", "sh", "-c", command], cwd=place.path, env=place.env)
    shared.rmdir()
    assert result.rc == 2
    assert "✗ the machines are not alike\n" in result.err
    assert "missing ✗" in result.err
    assert "--sync" in result.err


def test_a_machine_that_is_missing_at_the_start(machines: Machines, place: Place) -> None:
    """With --nodes MIN:MAX the others begin, and it is said who is missing; with one more than needed, who is spare."""
    place.write("train.py", SAY)
    result = machines.run(place, "--nodes", "2:3", "train.py", names=("no-such-machine", "n1", "n3")).ok()
    assert result.out == "n1 0 0 0 2 1 2 10.88.0.1 eth0\n"
    assert "… without no-such-machine: there is no machine named no-such-machine" in result.err
    result = machines.run(place, "--nodes", "2", "--name", "two", "train.py").ok()
    assert "… n3 is spare\n" in result.err
    result = machines.run(place, "--nodes", "3", "--node-wait", "1", "train.py", names=("n1", "n2", "no-such-machine"))
    assert result.rc == 2
    assert "✗ 2 of the 3 machines that are needed answer; missing: no-such-machine\n" in result.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 75)])
def test_signals_reach_the_ranks(machines: Machines, place: Place, number: int, code: int) -> None:
    place.write("train.py", f"""
        import os, signal, sys, time
        got = []
        signal.signal({int(number)}, lambda number, frame: got.append(number))
        open("ready" + os.environ["RANK"], "w")
        while not got:
            time.sleep(0.02)
        print("got", signal.Signals(got[0]).name)
        sys.exit({code})
    """)  # fmt: skip
    with machines.started(place, "train.py", names=("n1", "n2")) as launcher:
        while not all((place.path / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        launcher.send_signal(number)
        assert launcher.wait(20) == code
    assert place.log(0) == place.log(1) == f"got {signal.Signals(number).name}\n"


def test_one_other_machine_alone(machines: Machines, place: Place) -> None:
    place.write("train.py", SAY)
    result = machines.run(place, "train.py", names=("n2",), slots=2).ok()
    assert result.out == "n2 0 0 0 2 2 1 127.0.0.1 -\n"
    assert place.record()["via"] == "ssh"


def test_a_login_that_talks(machines: Machines, place: Place) -> None:
    """What a login script prints to standard output comes before the agent's first word, and does no harm."""
    talk = place.write("login", """\
        #!/bin/sh
        echo "Welcome! 3 updates"; echo '{"not": "ours"}'; echo "quota exceeded" >&2
        exec sh -c "$SSH_ORIGINAL_COMMAND"
    """)  # fmt: skip
    talk.chmod(0o755)
    place.write("train.py", SAY)
    with machines.door(place, 2, f"ForceCommand {talk}\n") as (config, _):
        result = machines.run(place, "train.py", names=("n3", "n1"), config=config).ok()
    assert result.out == "n3 0 0 0 2 1 2 10.88.0.3 eth0\n"


@pytest.mark.parametrize("delay", [0.7, 1.5, 2.5])
def test_the_launcher_is_killed_before_the_ranks_are_there(
    machines: Machines, torch_place: Place, delay: float
) -> None:
    """While ssh connects, the machines are looked at, or torch is imported."""
    torch_place.write("train.py", "import time; time.sleep(600)\n")
    torch_place.env[MARKER] = job = uuid.uuid4().hex
    with machines.started(torch_place, "train.py", names=("n1", "n2")) as launcher:
        time.sleep(delay)
        launcher.send_signal(signal.SIGKILL)
        assert marked(job, wait_s=10) == ()


def test_a_configuration_that_is_made_for_logins(machines: Machines, place: Place) -> None:
    """Forwarded ports, a command, a terminal, connections that are kept: none of them is in the way, or is left."""
    config = place.write("config", f"""\
        Host n2
            LocalForward 9999 localhost:22
            ExitOnForwardFailure yes
            RemoteCommand bash -l
            RequestTTY force
            ControlMaster auto
            ControlPath {place.path}/kept-%h
            ControlPersist 5m
    """)  # fmt: skip
    config.write_text(config.read_text() + machines.ssh_config.read_text())
    place.write("train.py", SAY)
    machines.run(place, "train.py", names=("n2", "n1"), config=config).ok()
    assert not list(place.path.glob("kept-*"))


def test_a_gate_that_lets_in_one_at_a_time(machines: Machines, place: Place) -> None:
    """All machines behind one ssh server, which hangs up on who comes while another is at the door: they come again."""
    place.write("train.py", SAY)
    with machines.door(place, 0, "MaxStartups 1:100:1\n") as (config, _):
        text = config.read_text().replace("Host n1\n", "Host gate\n    HostName n1\n    HostKeyAlias [n1]:2222\n", 1)
        config.write_text(f"Host n1 n2 n3\n    ProxyJump gate\n{text}")
        result = machines.run(place, "train.py", config=config).ok()
    assert result.out == "n1 0 0 0 3 1 3 10.88.0.1 eth0\n"
