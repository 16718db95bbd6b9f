"""``instep run --via mpirun`` over real machines, by Open MPI and by MPICH."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import faults
from tests.cluster.machines import INSTEP
from tests.cluster.ssh_jobs import WAIT, place_on, ready
from tests.cluster.task_jobs import OUT_OF_STEP, SUMS, WITHIN_S, command_lines, processes, seconds_until_gone

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox
    from tests.launch.jobs import Place

PROGRAMS = ("mpirun.openmpi", "mpiexec.mpich")
both = pytest.mark.parametrize("program", PROGRAMS)


def options(sandbox: Sandbox, program: str, nproc: int = 1) -> list[str]:
    """Of `instep run`, typed on this host: mpirun is then started on the head of the inventory."""
    return ["--inventory", str(sandbox.inventory), "--via", "mpirun", "--mpirun", program, "--nproc", str(nproc)]


def note(what: str, sandbox: Sandbox, begin: float, code: int, err: str) -> None:
    """A line of the table of faults."""
    seconds = seconds_until_gone(sandbox, begin)
    faults.note(what, seconds, code, err)
    assert seconds < WITHIN_S


@both
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("n1:2,n2:2", ["n1: 0/2/0/2", "n1: 1/2/0/2", "n2: 0/2/1/2", "n2: 1/2/1/2"]),
        ("n3:2,n1:1", ["n3: 0/2/0/2", "n3: 1/2/0/2", "n1: 0/1/1/2"]),  # n1, where it is typed, is not the first
    ],
)
def test_the_ranks_meet(sandbox: Sandbox, program: str, hosts: str, expected: list[str]) -> None:
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    argv = [INSTEP, "run", "--hosts", hosts, "--via", "mpirun", "--mpirun", program, "--show", "all", "sums.py"]
    result = sandbox.exec("n1", argv, cwd=place.path, env=place.env).ok()
    total = "1" * len(expected)
    said = sorted(re.findall(r"rank (\d+) on (n\d: [\d/]+) sum (\d+)", result.out))
    assert said == [(str(rank), where, total) for rank, where in enumerate(expected)], str(result)
    record = place.record()
    assert (record["via"], record["outcome"]) == ("mpirun", "finished")
    assert not processes(sandbox)


@both
def test_a_rank_that_raises_is_named_once(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "2":
            raise ValueError("no such luck")
        time.sleep(600)
        """,
    )
    result = place.run(*options(sandbox, program), "train.py")
    assert result.rc == 1, str(result)
    assert result.err.count("ValueError: no such luck") == 2, str(result)  # the headline, the traceback
    assert "✗ rank 2 on n3 failed: ValueError: no such luck" in result.err
    assert "ending the other 2 ranks" in result.err
    assert "mpi" not in result.err.partition("✗")[2].replace("mpirun.txt", ""), str(result)  # nor anything of its words
    assert place.record()["exit_codes"] == {"0": 143, "1": 143, "2": 1}
    assert not processes(sandbox)


@both
def test_a_rank_that_is_killed(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        (rank,) = [pid for pid, words in processes(sandbox) if re.search(r"single\.py \d+ 2 train\.py", words)]
        begin = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert run.end() == 137
        assert "✗ rank 2 on n3 failed: killed by signal 9 (SIGKILL)" in run.err
        note(f"{program}: rank killed", sandbox, begin, 137, run.err)


@both
def test_ctrl_c(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        """
        import os, time
        from pathlib import Path
        Path("ready" + os.environ["RANK"]).touch()
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            Path("saved" + os.environ["RANK"]).touch()
        """,
    )
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        begin = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.end() == 130
        assert "■ SIGINT: passed on to the 3 ranks" in run.err
        note(f"{program}: Ctrl-C", sandbox, begin, 130, run.err)
    assert sorted(path.name for path in place.path.glob("saved*")) == ["saved0", "saved1", "saved2"]
    assert place.record()["outcome"] == "interrupted"


@both
def test_user_signals_reach_the_ranks(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        """
        import os, signal, sys
        from pathlib import Path
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
        Path("ready" + os.environ["RANK"]).touch()
        print(signal.Signals(signal.sigwait([signal.SIGUSR1, signal.SIGUSR2])).name)
        sys.exit(75)
        """,
    )
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        run.signal(signal.SIGUSR2)  # at which MPICH's mpiexec would end
        assert run.end() == 75
    assert [place.log(rank) for rank in range(3)] == ["SIGUSR2\n"] * 3


@pytest.mark.parametrize(
    ("program", "where"), [(PROGRAMS[0], "here"), (PROGRAMS[0], "on the head"), (PROGRAMS[1], "on the head")]
)
def test_the_launcher_is_killed(sandbox: Sandbox, program: str, where: str) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        begin = time.monotonic()
        os.kill(run.process.pid if where == "here" else launcher_of(place), signal.SIGKILL)
        note(f"{program}: launcher killed {where}", sandbox, begin, run.end() if where == "here" else 1, run.err)


def launcher_of(place: Place) -> int:
    """The pid, by this host's count, of the `instep run` that carries the run out."""
    pid = place.record()["pid"]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status, words = (entry / "status").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        numbers = re.search(r"^NSpid:(.*)$", status, re.MULTILINE)
        if numbers and numbers[1].split()[1:] == [str(pid)] and b"--via" in words:
            return int(entry.name)
    raise AssertionError(f"no launcher with pid {pid}")


@both
def test_mpirun_is_killed(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        (mpirun,) = [pid for pid, words in processes(sandbox) if words.startswith(f"/usr/bin/{program} ")]
        begin = time.monotonic()
        os.kill(mpirun, signal.SIGKILL)
        code = run.end()
        assert code == 137, run.err
        assert f"✗ {program} was killed by signal 9 (SIGKILL), and the ranks with it" in run.err
        note(f"{program} killed", sandbox, begin, code, run.err)


@pytest.mark.parametrize(
    ("program", "how"), [(PROGRAMS[0], "power"), (PROGRAMS[0], "network"), (PROGRAMS[1], "network")]
)
def test_a_machine_is_lost(sandbox: Sandbox, program: str, how: str) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started(*options(sandbox, program), "train.py") as run:
        ready(run, 3)
        begin = time.monotonic()
        (sandbox.kill if how == "power" else sandbox.cut)("n2")
        code = run.end()
        assert code == 1, run.err
        assert re.search(r"✗ (n2 is out of reach|what mpi\S+ had started on n2 for rank 1 has gone)", run.err), run.err
        note(f"{program}: {how} of a machine", sandbox, begin, code, run.err)
    assert place.record()["first_failure"]["host"] == "n2"


def test_the_guard_watches_all_machines(sandbox: Sandbox) -> None:
    place = place_on(sandbox, torch=True)
    place.write("train.py", OUT_OF_STEP)
    result = place.run(*options(sandbox, PROGRAMS[0]), "train.py")
    assert result.rc == 86, str(result)
    assert "rank 2 left the common path at train.py:7   if loss != loss:" in result.err
    assert (place.runs[0] / "stacks" / "rank-2.txt").exists()
    assert not processes(sandbox)


def test_more_ranks_than_an_allocation_has_slots(sandbox: Sandbox) -> None:
    """Open MPI would start two of the three, and say nothing."""
    place = place_on(sandbox)
    place.write("train.py", "open('ran', 'w')")
    words = ["--via", "mpirun", "--mpirun", PROGRAMS[0], "--hosts", "n1:2,n2:1", "train.py"]
    argv = ["salloc", "--quiet", "-N2", INSTEP, "run", *words]
    result = sandbox.exec("n1", argv, cwd=place.path, env={"SHELL": "/bin/sh", **place.env})
    assert result.rc == 2, str(result)
    assert "has not enough slots for these ranks" in result.err
    assert "n1: 2 ranks, 1 slots" in result.err
    assert not (place.path / "ran").exists()


@both
def test_a_secret_is_on_no_command_line(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.env["MY_TOKEN"] = "s3cret-of-mine"
    place.write(
        "train.py",
        """
        import os, time
        from pathlib import Path
        Path("ready" + os.environ["RANK"]).write_text(os.environ["MY_TOKEN"])
        time.sleep(2)
        """,
    )
    with place.started(*options(sandbox, program), "--env", "MY_TOKEN", "train.py") as run:
        ready(run, 3)
        assert not [words for words in command_lines(sandbox) if "s3cret-of-mine" in words or '"key"' in words]
        assert run.end() == 0
    assert [(place.path / f"ready{rank}").read_text() for rank in range(3)] == ["s3cret-of-mine"] * 3


def test_no_mpirun(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", "pass")
    result = place.run(*options(sandbox, "mpirun.nobody"), "train.py")
    assert result.rc == 2
    assert "✗ there is no such program on this machine" in result.err
    assert "looked for mpirun.nobody in PATH=" in result.err
    assert "apt-get install openmpi-bin" in result.err
    assert not place.runs


@both
def test_a_machine_that_ssh_cannot_reach(sandbox: Sandbox, program: str) -> None:
    place = place_on(sandbox)
    place.write("train.py", "pass")
    argv = [INSTEP, "run", "--hosts", "n1,nobody.invalid", "--via", "mpirun", "--mpirun", program, "train.py"]
    result = sandbox.exec("n1", argv, cwd=place.path)
    assert result.rc == 2, str(result)
    assert "✗ there is no machine named nobody.invalid" in result.err
    assert result.seconds < 10
    assert not place.runs
    assert not processes(sandbox)


def test_json(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", "import os; print('rank', os.environ['RANK'])")
    result = place.run(*options(sandbox, PROGRAMS[0]), "--json", "train.py").ok()
    found = json.loads(result.out)
    assert (found["outcome"], found["via"], found["world_size"]) == ("finished", "mpirun", 3)
    assert "rank 0" in result.err
