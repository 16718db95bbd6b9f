"""Whatever dies, nothing of the job is left on any machine within 10 s, and the user is told what it was."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

from tests import faults
from tests.cluster.ssh_jobs import WAIT, WITHIN_S, agent_of, options, place_on, processes, ready, seconds_until_gone

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox


def note(what: str, seconds: float, code: int, err: str) -> None:
    """A line of the table."""
    faults.note(what, seconds, code, err)
    assert seconds < WITHIN_S


def test_a_machine_loses_its_power(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        begin = time.monotonic()
        sandbox.kill("n3")
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("machine switched off", seconds, code, run.err)
        assert code == 1
        assert re.search(
            r"✗ (n3 is out of reach: nothing was heard from it for 6 s|the connection to n3 has ended)", run.err
        )
        assert "ending the other 2 ranks" in run.err
    record = place.record()
    assert (record["outcome"], record["first_failure"]["host"]) == ("failed", "n3")
    assert record["exit_codes"] == {"0": 143, "1": 143, "2": 137}


def test_the_network_of_a_machine_is_cut(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        begin = time.monotonic()
        sandbox.cut("n2")
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("network cut", seconds, code, run.err)
        assert code == 1
        assert "✗ n2 is out of reach: nothing was heard from it for 6 s" in run.err
        assert "n2: could not be looked at again" in run.err
    assert place.record()["first_failure"]["host"] == "n2"


def test_an_agent_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        agent = agent_of(run, job, 1)
        begin = time.monotonic()
        os.kill(agent, signal.SIGKILL)
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("agent killed", seconds, code, run.err)
        assert code == 1
        assert "✗ the agent on n2 has ended" in run.err


def test_the_connection_ends(sandbox: Sandbox) -> None:
    """Of one machine: its ssh is killed."""
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        (ssh,) = [one.pid for one in processes(job) if one.words.startswith("ssh ") and " -- n3 " in one.words]
        begin = time.monotonic()
        os.kill(ssh, signal.SIGKILL)
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("connection ended", seconds, code, run.err)
        assert code == 1
        assert "✗ the connection to n3 has ended: ssh was killed by signal 9 (SIGKILL)\n" in run.err


def test_the_launcher_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        begin = time.monotonic()
        run.signal(signal.SIGKILL)
        seconds = seconds_until_gone(job, begin)
        note("launcher killed (SIGKILL)", seconds, run.end(), run.err)


def test_a_rank_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        WAIT.replace(
            "time.sleep(600)", "time.sleep(0.5)\n    if rank == '4': os.kill(os.getpid(), 9)\n    time.sleep(600)"
        ),
    )
    with place.started(*options(sandbox, 2), "train.py") as run:
        job = ready(run, 6)
        begin = time.monotonic()
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("rank killed", seconds, code, run.err)
        assert code == 137
        assert "✗ rank 4 on n3 failed: killed by signal 9 (SIGKILL)" in run.err
        assert "ending the other 5 ranks" in run.err


def test_a_disk_is_full_on_one_machine(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        WAIT.replace("time.sleep(600)", """
    if rank == "2":
        subprocess.run("mkdir -p /mnt/small && mount -t tmpfs -o size=64k tmpfs /mnt/small", shell=True, check=True)
        try:
            with open("/mnt/small/cache", "wb") as file:
                file.write(b"x" * 1_000_000)
        finally:
            subprocess.run("umount -l /mnt/small", shell=True)
    time.sleep(600)
"""),
    )  # fmt: skip
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        begin = time.monotonic()
        seconds = seconds_until_gone(job, begin)
        code = run.end()
        note("disk full on one machine", seconds, code, run.err)
        assert code == 1
        assert "✗ rank 2 on n3 failed: OSError: [Errno 28] No space left on device" in run.err


def test_sshd_refuses_on_one_machine(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", "open('ran', 'w')\n")
    sandbox.exec("n2", ["systemctl", "stop", "ssh.socket", "ssh.service"]).ok()
    try:
        begin = time.monotonic()
        result = place.run(*options(sandbox), "train.py")
        note("sshd refuses on one machine", time.monotonic() - begin, result.rc, result.err)
    finally:
        sandbox.exec("n2", ["systemctl", "start", "ssh.service"]).ok()
    assert result.rc == 2
    assert "✗ n2 refuses connections of ssh\n" in result.err
    assert "Connection refused" in result.err
    assert place.runs == []
    assert not (place.path / "ran").exists()


# Takes all ports from which a master port is chosen, but for those that are named.
TAKE = """
import pathlib, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
held = []
for port in set(range(20000, 29500)) - set(map(int, sys.argv[1:])):
    held.append(socket.create_server(("", port)))
pathlib.Path("taken").touch()
time.sleep(600)
"""


def test_the_port_is_taken(sandbox: Sandbox) -> None:
    """All but one: it is found. All: that is said."""
    place = place_on(sandbox)
    place.write("take.py", TAKE)
    place.write("train.py", "import os\nprint('at', os.environ['MASTER_PORT'])\n")
    for free in (["25555"], []):
        service = ["systemd-run", "--quiet", "--unit=taker", f"--working-directory={place.path}"]
        sandbox.exec("n1", [*service, sys.executable, "take.py", *free]).ok()
        try:
            deadline = time.monotonic() + 20
            while not (place.path / "taken").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            result = place.run(*options(sandbox), "train.py")
        finally:
            sandbox.exec("n1", ["systemctl", "stop", "taker"]).ok()
        (place.path / "taken").unlink()
        if free:
            assert "at 25555" in result.ok().out
        faults.note(f"{'all ports but one' if free else 'all ports'} taken", result.seconds, result.rc, result.err)
    assert result.rc == 2
    assert "no free TCP port from 20000 to 29499 on n1" in result.err


def test_two_jobs_on_the_same_machines(sandbox: Sandbox) -> None:
    """The end of one, a bad one at that, does not touch the other."""
    first, second = place_on(sandbox), place_on(sandbox)
    for place in (first, second):
        place.write("train.py", WAIT)
    with first.started(*options(sandbox), "train.py") as one, second.started(*options(sandbox), "train.py") as two:
        job, other = ready(one, 3), ready(two, 3)
        before = sorted(process.pid for process in processes(other))
        begin = time.monotonic()
        os.kill(agent_of(one, job, 1), signal.SIGKILL)
        seconds = seconds_until_gone(job, begin)
        code = one.end()
        note("agent killed, of two jobs", seconds, code, one.err)
        time.sleep(1)
        assert sorted(process.pid for process in processes(other)) == before
        begin = time.monotonic()
        two.signal(signal.SIGINT)
        seconds = seconds_until_gone(other, begin)
        code = two.end()
        note("Ctrl-C", seconds, code, two.err)
        assert code == 130
        assert "■ SIGINT: passed on to the 3 ranks" in two.err
    assert second.record()["outcome"] == "interrupted"


def test_ctrl_z_and_on_again(sandbox: Sandbox) -> None:
    """The agents do not take the silence of a stopped launcher for its end."""
    place = place_on(sandbox)
    place.write("train.py", WAIT.replace("600", "8.5"))
    with place.started(*options(sandbox), "train.py") as run:
        job = ready(run, 3)
        run.signal(signal.SIGTSTP)
        time.sleep(7)
        assert {process.host for process in processes(job)} != set()
        assert len([one for one in processes(job) if "zygote.py" in one.words]) >= 6  # fork servers and ranks
        run.signal(signal.SIGCONT)
        assert run.end() == 0, run.err
    assert place.record()["outcome"] == "finished"
