"""Jobs on the sandbox whose ranks mpirun or srun starts: what is left of them anywhere, daemons included."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox

WITHIN_S = 10.0  # so long may anything of a job be left anywhere
_OURS = (
    "instep.launch.tasks.task",
    "tasks/single.py",
    "orted",
    "prted",
    "hydra_pmi_proxy",
    "mpirun",
    "mpiexec",
    "prterun",
)

# All ranks meet and say a sum that they can only know together.
SUMS = """
    import os, socket
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    sum_of_all = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(sum_of_all)
    here = "/".join(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"))
    print(f"rank {dist.get_rank()} on {socket.gethostname()}: {here} sum {sum_of_all.item():.0f}")
    dist.destroy_process_group()
"""

# Rank 2 alone skips a collective.
OUT_OF_STEP = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(50):
        loss = float("nan") if step == 5 and dist.get_rank() == 2 else 1.0
        if loss != loss:
            continue
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
"""


def everywhere(sandbox: Sandbox) -> list[tuple[int, str]]:
    """All processes on these machines: by this host's count, and their command lines."""
    found = []
    own = Path("/").stat()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_there = Path(f"{entry.path}/root{sandbox.share}").exists()
            root = Path(entry.path, "root").stat()
        except OSError:
            continue
        if is_there and (root.st_dev, root.st_ino) != (own.st_dev, own.st_ino):
            found.append((int(entry.name), words))
    return found


def processes(sandbox: Sandbox) -> list[tuple[int, str]]:
    """Those that a run with mpirun or srun may have made."""
    return [(pid, words) for pid, words in everywhere(sandbox) if any(word in words for word in _OURS)]


def seconds_until_gone(sandbox: Sandbox, begin: float) -> float:
    """Since when, until nothing of the job was left on any machine."""
    while left := processes(sandbox):
        seconds = time.monotonic() - begin
        assert seconds < 2 * WITHIN_S, left
        time.sleep(0.05)
    return time.monotonic() - begin


def command_lines(sandbox: Sandbox) -> list[str]:
    """Those of all processes on these machines."""
    found = [words for _, words in everywhere(sandbox)]
    assert any("instep.launch.tasks.task" in words for words in found), found
    return found
