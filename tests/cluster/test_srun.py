"""``instep run`` inside a Slurm allocation, whose srun starts the ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests import faults
from tests.cluster.machines import INSTEP
from tests.cluster.ssh_jobs import WAIT, place_on
from tests.cluster.task_jobs import (
    OUT_OF_STEP,
    SUMS,
    WITHIN_S,
    command_lines,
    everywhere,
    processes,
    seconds_until_gone,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.machines import Sandbox
    from tests.commands import Result
    from tests.launch.jobs import Place


def salloc(sandbox: Sandbox, place: Place, options: str, *words: str, limit_s: float = 40) -> Result:
    """``instep run`` in an allocation with these options, typed on the head."""
    argv = ["salloc", "--quiet", *options.split(), INSTEP, "run", *words]
    return sandbox.exec("n1", argv, cwd=place.path, env={"SHELL": "/bin/sh", **place.env}, limit_s=limit_s)


@contextmanager
def started(sandbox: Sandbox, place: Place, options: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The same, while it runs; what it says on its standard error comes into err.txt."""
    variables = [f"{name}={value}" for name, value in {"SHELL": "/bin/sh", **place.env}.items()]
    argv = ["env", *variables, "salloc", "--quiet", *options.split(), INSTEP, "run", *words]
    with (place.path / "err.txt").open("wb") as err:
        process = subprocess.Popen(
            [INSTEP, "sandbox", "exec", "--name", sandbox.name, "n1", *argv],
            cwd=place.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield process
        seconds_until_gone(sandbox, time.monotonic())
    finally:
        process.kill()
        process.wait()
        sandbox.exec("n1", ["scancel", "--user=root"])


def wait_for(place: Place, ranks: int, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not all((place.path / f"ready{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < end, (place.path / "err.txt").read_text()
        time.sleep(0.05)


def pid_of(pattern: str, sandbox: Sandbox) -> int:
    """The first process on these machines whose command line is like this."""
    return min(pid for pid, words in everywhere(sandbox) if re.match(pattern, words))


def note(what: str, sandbox: Sandbox, begin: float, code: int, place: Place) -> None:
    """A line of the table of faults."""
    seconds = seconds_until_gone(sandbox, begin)
    faults.note(what, seconds, code, (place.path / "err.txt").read_text())
    assert seconds < WITHIN_S


@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        ("-N2 --ntasks-per-node=2", (), ["n1: 0/2/0/2", "n1: 1/2/0/2", "n2: 0/2/1/2", "n2: 1/2/1/2"]),
        ("-N2 -n3", (), ["n1: 0/2/0/2", "n1: 1/2/0/2", "n2: 0/1/1/2"]),
        ("-N2", ("--nproc", "2"), ["n1: 0/2/0/2", "n1: 1/2/0/2", "n2: 0/2/1/2", "n2: 1/2/1/2"]),
        ("-N3", ("--hosts", "n3:2,n1"), ["n3: 0/2/0/2", "n3: 1/2/0/2", "n1: 0/1/1/2"]),
        ("-N3", ("--nodes", "2"), ["n1: 0/1/0/2", "n2: 0/1/1/2"]),
    ],
)
def test_the_ranks_meet(sandbox: Sandbox, options: str, words: tuple[str, ...], expected: list[str]) -> None:
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    via = ("--via", "slurm") if words else ()  # what is chosen where nothing is said
    result = salloc(sandbox, place, options, *via, *words, "--show", "all", "sums.py").ok()
    said = sorted(re.findall(r"rank (\d+) on (n\d: [\d/]+) sum (\d+)", result.out))
    assert said == [(str(rank), where, "1" * len(expected)) for rank, where in enumerate(expected)], str(result)
    record = place.record()
    assert (record["via"], record["outcome"]) == ("slurm", "finished")
    assert record["slurm_job"]
    assert not processes(sandbox)


def test_a_rank_that_raises_is_named_once(sandbox: Sandbox) -> None:
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
    result = salloc(sandbox, place, "-N3", "train.py")
    assert result.rc == 1, str(result)
    assert result.err.count("ValueError: no such luck") == 2, str(result)  # the headline, the traceback
    assert "✗ rank 2 on n3 failed: ValueError: no such luck" in result.err
    assert "srun:" not in result.err
    assert place.record()["exit_codes"] == {"0": 143, "1": 143, "2": 1}
    assert not processes(sandbox)


def test_a_rank_that_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        begin = time.monotonic()
        os.kill(pid_of(r"\S+ \S+single\.py \d+ 2 train\.py", sandbox), signal.SIGKILL)
        assert run.wait(30) == 137
        note("srun: rank killed", sandbox, begin, 137, place)
    assert "✗ rank 2 on n3 failed: killed by signal 9 (SIGKILL)" in (place.path / "err.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_is_asked_to_end(sandbox: Sandbox, number: signal.Signals) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        begin = time.monotonic()
        os.kill(pid_of(r"\S+python\S* \S+instep run train\.py", sandbox), number)
        assert run.wait(30) == 128 + number
        note(f"srun: {number.name} to the launcher", sandbox, begin, 128 + number, place)
    assert f"■ {number.name}: passed on to the 3 ranks" in (place.path / "err.txt").read_text()
    assert place.record()["outcome"] == "interrupted"


def test_the_launcher_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        begin = time.monotonic()
        os.kill(pid_of(r"\S+python\S* \S+instep run train\.py", sandbox), signal.SIGKILL)
        note("srun: launcher killed", sandbox, begin, 137, place)
        run.wait(30)


def test_srun_is_killed(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        begin = time.monotonic()
        os.kill(pid_of(r"srun --ntasks=3", sandbox), signal.SIGKILL)
        assert run.wait(30) == 137
        note("srun killed", sandbox, begin, 137, place)
    assert "✗ srun was killed by signal 9 (SIGKILL), and the ranks with it" in (place.path / "err.txt").read_text()


def test_a_machine_loses_its_network(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        begin = time.monotonic()
        sandbox.cut("n3")
        assert run.wait(40) == 1
        note("srun: network of a machine", sandbox, begin, 1, place)
    assert "✗ n3 is out of reach" in (place.path / "err.txt").read_text()


def test_a_secret_is_on_no_command_line(sandbox: Sandbox) -> None:
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
    with started(sandbox, place, "-N3", "train.py") as run:
        wait_for(place, 3)
        mine = [words for words in command_lines(sandbox) if "s3cret-of-mine" in words]
        assert not [words for words in mine if "sandbox exec" not in words and " env " not in words], mine
        assert run.wait(30) == 0
    assert [(place.path / f"ready{rank}").read_text() for rank in range(3)] == ["s3cret-of-mine"] * 3


@pytest.mark.parametrize("tasks", ["rank", "node"])
def test_the_guard_watches_all_machines(sandbox: Sandbox, tasks: str) -> None:
    place = place_on(sandbox, torch=True)
    place.write("train.py", OUT_OF_STEP)
    result = salloc(sandbox, place, "-N2 -n3", "--tasks", tasks, "train.py")
    assert result.rc == 86, str(result)
    assert "✗ ranks out of step" in result.err
    assert "rank 2 left the common path at train.py:7   if loss != loss:" in result.err
    assert (place.runs[0] / "stacks" / "rank-2.txt").exists()
    assert not processes(sandbox)


def test_an_agent_for_each_machine(sandbox: Sandbox) -> None:
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    result = salloc(sandbox, place, "-N3 -n4", "--tasks", "node", "--show", "all", "sums.py").ok()
    said = sorted(re.findall(r"rank (\d+) on (n\d: [\d/]+) sum (\d+)", result.out))
    where = ["n1: 0/2/0/3", "n1: 1/2/0/3", "n2: 0/1/1/3", "n3: 0/1/2/3"]
    assert said == [(str(rank), one, "1111") for rank, one in enumerate(where)], str(result)
    assert place.record()["via"] == "slurm"


def test_two_runs_in_one_allocation(sandbox: Sandbox) -> None:
    """Neither waits for the other, and they do not meet each other."""
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    both = f"{INSTEP} run --name a sums.py & {INSTEP} run --name b sums.py; wait $!"
    argv = ["salloc", "--quiet", "-N2", "sh", "-c", both]
    result = sandbox.exec("n1", argv, cwd=place.path, env={"SHELL": "/bin/sh", **place.env}).ok()
    assert result.out.count("sum 11") == 2, str(result)


def test_more_machines_than_there_are(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", "pass")
    result = salloc(sandbox, place, "-N2", "--nodes", "3", "train.py")
    assert result.rc == 2, str(result)
    assert "--nodes 3, but the allocation has 2" in result.err
    assert not place.runs
