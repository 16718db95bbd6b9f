"""`instep ps`, `logs` and `stop` of a run that a real Slurm has in its queue or runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cli.machines import write_record

if TYPE_CHECKING:
    from tests.commands import Result
    from tests.real.slurm import Cluster

INSTEP = str(Path(sys.executable).with_name("instep"))
BATCH = "#!/bin/sh\nINSTEP_JOB=mine-55 exec sleep 100\n"


def instep(cluster: Cluster, folder: Path, *words: str, limit_s: float = 40) -> Result:
    return cluster.run([INSTEP, *words], cwd=folder, limit_s=limit_s)


def submit(cluster: Cluster, folder: Path, *words: str) -> str:
    """A batch job as `instep run --via slurm` leaves one: the launcher that submitted it has gone."""
    (folder / "job.sbatch").write_text(BATCH)
    argv = ["sbatch", "--parsable", "--output", "out.txt", *words, "job.sbatch"]
    job = cluster.run(argv, cwd=folder).ok().out.strip()
    write_record(folder / "runs" / "mine", job="mine-55", via="slurm", slurm_job=job)
    return job


def listed(cluster: Cluster, folder: Path) -> dict[str, Any]:
    (found,) = json.loads(instep(cluster, folder, "ps", "--json").ok().out)["runs"]
    return dict(found)


def test_a_batch_job_runs_and_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path)
    deadline = time.monotonic() + 20
    while listed(cluster, tmp_path)["state"] != "running":
        assert time.monotonic() < deadline, listed(cluster, tmp_path)
        time.sleep(0.2)
    assert f"scancel {job}" in instep(cluster, tmp_path, "stop", "mine", "--dry-run").ok().out
    assert f"  job {job}  " in instep(cluster, tmp_path, "ps").ok().out
    result = instep(cluster, tmp_path, "stop", "mine").ok()
    assert "■ nothing is left of mine" in result.err
    left = [node.run(["ps", "-eo", "args"]).ok().out for node in cluster.nodes]
    assert "sleep 100" not in "".join(left)
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["outcome"] == "interrupted"
    assert json.loads(instep(cluster, tmp_path, "ps", "--json").ok().out)["runs"] == []


def test_a_batch_job_that_waits_is_taken_from_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    submit(cluster, tmp_path, "--hold")
    assert listed(cluster, tmp_path)["state"] == "pending (JobHeldUser)"
    result = instep(cluster, tmp_path, "stop", "mine").ok()
    assert result.seconds < 10
    assert cluster.run(["squeue", "--noheader"]).ok().out == ""
    assert instep(cluster, tmp_path, "stop", "mine").ok().err.startswith("mine has ended already: interrupted")


def test_the_allocation_of_a_user_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    """A run inside salloc whose launcher has gone: what is stopped is the run, not the allocation."""
    script = f"""
        mkdir -p runs/mine/log
        sed "s/JOBID/$SLURM_JOB_ID/" template.json > runs/mine/run.json
        {INSTEP} stop mine && squeue --noheader --jobs $SLURM_JOB_ID --format %T
    """
    write_record(tmp_path / "runs" / "mine", job="mine-55", via="slurm", slurm_job="JOBID")
    (tmp_path / "runs" / "mine" / "run.json").rename(tmp_path / "template.json")
    result = cluster.run(["salloc", "-N1", "sh", "-c", script], cwd=tmp_path, limit_s=40).ok()
    assert result.out.strip() == "RUNNING"


def test_a_job_that_slurm_does_not_know_any_more(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "mine", job="mine-55", via="slurm", slurm_job="4711")
    assert listed(cluster, tmp_path)["state"] == "Slurm job 4711 has gone"
    result = instep(cluster, tmp_path, "logs", "mine", "--follow")
    assert result.rc == 1
    assert result.err.endswith("… mine: Slurm job 4711 has gone, and nobody wrote an end\n")
    instep(cluster, tmp_path, "stop", "mine").ok()
    assert json.loads((folder / "run.json").read_text())["outcome"] == "interrupted"
