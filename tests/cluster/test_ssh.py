"""Runs over ssh on real machines: sums, a folder that is not shared, and the head of an inventory."""

from __future__ import annotations

import shutil
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.ssh_jobs import WAIT, WITHIN_S, options, place_on, processes, ready, seconds_until_gone
from tests.commands import marked
from tests.launch.jobs import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.machines import Sandbox

SUMS = """
    import os
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.arange(1000.0) * (rank + 1)
    dist.all_reduce(x)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rank ** 2)
    if rank == 0:
        print(int(x.sum()), gathered)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("hosts", ["n1:2,n2:2", "n3:2,n1,n2"])
def test_the_same_sums_on_two_and_three_machines(sandbox: Sandbox, hosts: str) -> None:
    place = place_on(sandbox, torch=True)
    place.write("sums.py", SUMS)
    ssh = place.write(
        "bin/ssh", f'#!/bin/sh\nexec /usr/bin/ssh -F {sandbox.ssh_config} "$@"\n'
    )  # a user's ~/.ssh/config
    ssh.chmod(0o755)
    env = {"PATH": f"{ssh.parent}:/usr/bin:/bin:/usr/sbin"}
    result = place.run("--hosts", hosts, "--device", "cpu", "sums.py", env=env, limit_s=60).ok()
    assert result.out == "4995000 [0, 1, 4, 9]\n"
    assert len(place.record()["hosts"]) == hosts.count(",") + 1


@pytest.fixture
def own(sandbox: Sandbox) -> Iterator[Place]:
    """A folder that no machine shares."""
    folder = Path("/var/tmp", f"instep-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    place = Place(folder, torch=True)
    place.env["PYTHONPATH"] = place_on(sandbox).env["PYTHONPATH"]  # no torch: that takes its time
    place.write("train.py", "import os, helper\nprint(helper.word, os.uname().nodename, os.environ['INSTEP_RUN'])\n")
    place.write("helper.py", "word = 'first'\n")
    place.write(".gitignore", "*.bin\n")
    place.write("data.bin", "x")
    place.write(".git/config", "x")
    try:
        yield place
    finally:
        shutil.rmtree(folder)
        for node in sandbox.nodes:
            sandbox.exec(node, ["rm", "-rf", folder], cwd="/")


def test_a_folder_that_is_not_shared(sandbox: Sandbox, own: Place) -> None:
    """It is refused, copied with --sync (and shown before with --dry-run), and taken as it is with --own-copies."""
    words = [*options(sandbox), "--show", "all"]
    refused = own.run(*words, "train.py")
    assert refused.rc == 2
    assert "✗ the machines are not alike\n" in refused.err
    assert "not shared ✗" in refused.err
    assert "--sync" in refused.err
    assert own.runs == []

    own.run(*words, "--sync", "--dry-run", "train.py").ok()
    assert sandbox.exec("n2", ["ls", "-A", own.path], cwd="/").out == "", "only shown"
    result = own.run(*words, "--sync", "--name", "one", "train.py").ok()
    assert sorted(line.split("] ")[1] for line in result.out.splitlines()) == [
        f"first n{number} {own.path}/runs/one" for number in (1, 2, 3)
    ]
    assert "--sync: copied to n2: .gitignore, helper.py, train.py\n" in result.err
    there = set(sandbox.exec("n2", ["ls", "-A", own.path], cwd="/").ok().out.split())
    assert there - {"__pycache__"} == {".gitignore", "helper.py", "runs", "train.py"}

    own.run(*words, "--own-copies", "--name", "two", "train.py").ok()
    own.write("helper.py", "word = 'second'\n")
    differ = own.run(*words, "--own-copies", "train.py")
    assert differ.rc == 2
    assert "helper.py" in differ.err
    result = own.run(*words, "--sync", "--name", "three", "train.py").ok()
    assert result.out.count("second n") == 3


def test_the_run_is_started_on_the_head(sandbox: Sandbox) -> None:
    """mpirun is there, not here: the same command runs there, in the same folder, and its end comes back."""
    place = place_on(sandbox)
    place.write(
        "train.py",
        "import os, sys\nprint('from', os.uname().nodename, *sys.argv[1:])\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n",
    )
    words = ["--via", "mpirun", *options(sandbox), "--name", "r", "train.py", "--name", "a b"]
    result = place.run(*words)
    assert result.rc == 7, str(result)
    assert result.out == "from n1 --name a b\n"
    assert "✗ rank 1 on n2 failed: it left with exit code 7" in result.err
    assert (place.record()["via"], place.record()["launcher"]["host"]) == ("mpirun", "n1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_nothing_is_left_of_a_run_on_the_head(sandbox: Sandbox, number: int) -> None:
    place = place_on(sandbox)
    place.write("train.py", WAIT)
    with place.started("--via", "mpirun", *options(sandbox), "train.py") as run:
        job = ready(run, 3)
        begin = time.monotonic()
        run.signal(number)
        assert seconds_until_gone(job, begin) < WITHIN_S
        assert run.end() == (130 if number == signal.SIGINT else -9)
        assert not marked(run.job, wait_s=WITHIN_S - (time.monotonic() - begin))  # the launcher on the head, too
    assert not processes(job)
