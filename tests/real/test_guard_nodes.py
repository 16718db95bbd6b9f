"""``instep.init(guard=True)`` across nodes: one verdict over the ranks of two machines that a real srun has started."""

from __future__ import annotations

import json
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.slurm import Cluster

OUT_OF_STEP = 86
JOB = """
    import sys

    import torch
    import torch.distributed as dist

    import instep

    culprit = int(sys.argv[1])
    with instep.init(guard=True, device="cpu") as session:
        for step in range(8):
            loss = torch.tensor(float("nan") if step == 5 and session.rank == culprit else 1.0)
            if not torch.isfinite(loss):
                continue
            dist.all_reduce(torch.ones(10))
        print("well")
"""


def start(cluster: Cluster, folder: Path, culprit: int) -> tuple[int, str, str]:
    (folder / "job.py").write_text(dedent(JOB).lstrip())
    # Ranks 0 and 2 are on n1, 1 on n2.
    argv = ["srun", "-N2", "-n3", "--distribution=plane=1", sys.executable, "job.py", str(culprit)]
    result = cluster.run(argv, cwd=folder, limit_s=30)  # fails if a process is left
    left = [
        node.run(["sh", "-c", "ls -d /dev/shm/instep-guard-* 2>/dev/null || true"]).ok().out for node in cluster.nodes
    ]
    assert not "".join(left), f"{left} {result}"
    return result.rc, result.out, result.err


def test_a_rank_of_another_node_is_named(cluster: Cluster, tmp_path: Path) -> None:
    culprit = 1
    rc, _, err = start(cluster, tmp_path, culprit)
    assert rc == OUT_OF_STEP, err
    assert f"rank {culprit} left the common path at job.py:12   if not torch.isfinite(loss):" in err, err
    assert err.count("ranks out of step") == 1, err
    (run,) = (tmp_path / "runs").iterdir()
    found = json.loads((run / "desync.json").read_text())
    assert (found["ranks"], found["left_at"]["line"]) == ([culprit], 12)
    for rank, host in enumerate(["n1", "n2", "n1"]):
        text = (run / "stacks" / f"rank-{rank}.txt").read_text()
        assert text.startswith(f"rank {rank} on {host}: ")
        assert "all threads, innermost frame first:" in text


def test_nodes_in_step_end_well(cluster: Cluster, tmp_path: Path) -> None:
    rc, out, err = start(cluster, tmp_path, 99)
    assert rc == 0, err
    assert out.count("well") == 3
    assert "✗" not in err
    assert not (tmp_path / "runs").exists()
