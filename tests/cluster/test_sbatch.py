"""``instep run --via slurm`` over real machines, submitted from the head and from this host."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests import faults
from tests.cluster.machines import INSTEP
from tests.cluster.ssh_jobs import place_on
from tests.cluster.task_jobs import SUMS, processes

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox
    from tests.commands import Result


def said(result: Result) -> list[tuple[str, str, str]]:
    return sorted(re.findall(r"rank (\d+) on (n\d: [\d/]+) sum (\d+)", result.out))


def test_two_jobs_at_once_on_the_same_two_machines(sandbox: Sandbox) -> None:
    places = [place_on(sandbox, torch=True) for _ in range(2)]
    argv = [INSTEP, "run", "--via", "slurm", "--nodes", "2", "-n", "2", "--show", "all", "--follow", "sums.py"]
    with ThreadPoolExecutor() as pool:
        for place in places:
            place.write("sums.py", SUMS)
        found = [pool.submit(sandbox.exec, "n1", argv, cwd=one.path, env=one.env, limit_s=90) for one in places]
        results = [one.result().ok() for one in found]
    for place, result in zip(places, results, strict=True):
        hosts = [("n1", 0, 0), ("n1", 1, 0), ("n2", 0, 1), ("n2", 1, 1)]
        assert said(result) == [
            (str(rank), f"{host}: {local}/2/{node}/2", "1111") for rank, (host, local, node) in enumerate(hosts)
        ], str(result)
        record = place.record()
        assert (record["via"], record["outcome"], record["hosts"]) == ("slurm", "finished", ["n1", "n2"])
    assert places[0].record()["slurm_job"] != places[1].record()["slurm_job"]
    assert not processes(sandbox)


def test_three_machines_of_an_inventory_from_another_machine(sandbox: Sandbox) -> None:
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    words = ["--inventory", sandbox.inventory, "--via", "slurm", "-n", 1, "--show", "all", "--follow", "sums.py"]
    result = place.run(*words, limit_s=90).ok()
    assert said(result) == [(str(rank), f"n{rank + 1}: 0/1/{rank}/3", "111") for rank in range(3)], str(result)
    assert place.record()["hosts"] == ["n1", "n2", "n3"]
    assert not processes(sandbox)


def test_a_rank_that_raises(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("no data")
        time.sleep(600)
        """,
    )
    argv = [INSTEP, "run", "--via", "slurm", "--nodes", "2", "--json", "--follow", "train.py"]
    result = sandbox.exec("n1", argv, cwd=place.path, env=place.env)
    assert result.rc == 1, result
    assert result.err.count("ValueError: no data") >= 1
    assert "rank 1 on n2 failed" in result.err
    found = json.loads(result.out)
    assert (found["outcome"], found["first_failure"]["rank"], found["requeues"]) == ("failed", 1, 0)
    assert not processes(sandbox)


SAVES = """
    import os, signal, sys, time
    from pathlib import Path
    rank = os.environ["RANK"]
    saved = Path("saved" + rank)
    if saved.exists():
        print("goes on after", saved.read_text(), flush=True)
        sys.exit()

    def save(number, _):
        for again in (signal.SIGUSR1, signal.SIGTERM):  # Slurm and the launcher both send it
            signal.signal(again, signal.SIG_IGN)
        saved.write_text(signal.Signals(number).name)
        sys.exit(75)

    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGTERM, save)
    Path("ready" + rank).touch()
    time.sleep(600)
"""


class Stopped:
    """A job of two ranks that has a machine for itself, until Slurm stops it."""

    def __init__(self, sandbox: Sandbox, node: str, *options: str) -> None:
        self.place = place_on(sandbox)
        self.place.write("saves.py", SAVES)
        wanted = ("--partition=train", f"--nodelist={node}", "--exclusive", *options)
        slurm = [word for one in wanted for word in ("--slurm", one)]
        self._argv = [INSTEP, "run", "--via", "slurm", "-n", "2", "--name", "job", "--before", "20", *slurm]
        self._sandbox = sandbox

    def run(self) -> Result:
        """To its end."""
        argv = [*self._argv, "--follow", "saves.py"]
        return self._sandbox.exec("n1", argv, cwd=self.place.path, env=self.place.env, limit_s=180)

    def wait(self) -> str:
        """Until its ranks are there; the number of the job."""
        deadline = time.monotonic() + 60
        while not all((self.place.path / f"ready{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return str(self.place.record()["slurm_job"])


def test_a_time_limit_a_job_of_more_weight_and_scancel(sandbox: Sandbox) -> None:
    """Slurm stops three jobs at once; two save and go on, the one that was cancelled does not."""
    limited, preempted, cancelled = Stopped(sandbox, "n3", "--time=1"), Stopped(sandbox, "n2"), Stopped(sandbox, "n1")
    with ThreadPoolExecutor() as pool, ExitStack() as at_end:
        at_end.callback(sandbox.exec, "n1", ["scancel", "--user=root"])  # where this fails
        ends = [pool.submit(one.run) for one in (limited, preempted, cancelled)]
        jobs = [one.wait() for one in (limited, preempted, cancelled)]
        begin = time.monotonic()
        sandbox.exec("n1", ["scancel", jobs[2]]).ok()
        result = ends[2].result()
        faults.note("Slurm: scancel", time.monotonic() - begin, result.rc, result.err + result.out)
        assert (result.rc, cancelled.place.record()["requeues"]) == (75, 0), result
        urgent = ["srun", "--partition=urgent", "--nodelist=n2", "--exclusive", "sleep", "1"]
        begin = time.monotonic()
        sandbox.exec("n1", urgent, limit_s=120).ok()
        for what, one, end, number in (
            ("Slurm: preempted, requeued", preempted, ends[1], "SIGUSR1"),
            ("Slurm: time limit, requeued", limited, ends[0], "SIGUSR1"),
        ):
            result = end.result().ok()
            faults.note(what, time.monotonic() - begin, result.rc, result.err + result.out)
            record = one.place.record()
            assert (record["outcome"], record["requeues"]) == ("finished", 1), result
            assert f"goes on after {number}" in one.place.log(0)
    assert not processes(sandbox)
