"""``instep run --via slurm`` over real machines, submitted from the head and from this host."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

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
