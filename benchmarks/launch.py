"""Time a job that only joins, passes a barrier and leaves, on three machines with two ranks each.

    sudo python benchmarks/launch.py [--repeat 7] [--json]

`instep run --via ssh` beside torchrun, typed on all three machines at once in shells that are logged in already: it
does not pay for ssh, and instep does. The machines are a practice cluster, made for this and removed after it. The two
take turns; the figures are medians. Quote the ratio, not the seconds: three machines share the cores of one.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
NODES, RANKS = 3, 2
TARGET = 0.8
LIMIT_S = 120

PLAIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


@contextmanager
def cluster(share: Path) -> Iterator[dict[str, Any]]:
    """A practice cluster of this run's own, as `instep sandbox up --json` tells of it."""
    name = f"bench-{secrets.token_hex(3)}"
    shares = ["--share", str(share), "--share", str(ROOT)]
    words = ["up", "--json", "--name", name, "--nodes", str(NODES), *shares]
    try:
        made = subprocess.run(
            [BIN / "instep", "sandbox", *words], stdout=subprocess.PIPE, check=True, timeout=600
        ).stdout
        found: dict[str, Any] = json.loads(made)
        yield found
    finally:
        subprocess.run([BIN / "instep", "sandbox", "down", "--name", name], check=True, capture_output=True)


class Shell:
    """A login on a machine, with somebody at it."""

    def __init__(self, ssh_config: str, node: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            ["ssh", "-F", ssh_config, node, "bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.type(f"cd {folder} && export OMP_NUM_THREADS=1")  # torchrun's own choice, said without its warning
        self.wait()

    def type(self, command: str) -> None:
        """Type a command."""
        assert self.process.stdin
        self.process.stdin.write(f"{command}; echo ended $?\n")

    def wait(self) -> None:
        """Until it has ended, and well."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("ended "):
                assert line == "ended 0\n", line
                return
        raise AssertionError("the shell is gone")

    def close(self) -> None:
        """Log out."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def torchrun_s(shells: list[Shell], address: str, port: int) -> float:
    """Seconds until torchrun has ended on all machines."""
    begin = time.perf_counter()
    for rank, shell in enumerate(shells):
        where = f"--nnodes={NODES} --node-rank={rank} --master-addr={address} --master-port={port}"
        shell.type(f"{BIN}/torchrun {where} --nproc-per-node={RANKS} plain.py >torchrun-{rank}.txt 2>&1")
    for shell in shells:
        shell.wait()
    return time.perf_counter() - begin


def instep_s(inventory: str, folder: Path) -> float:
    """Seconds of `instep run`."""
    words = ["run", "--inventory", inventory, "--via", "ssh", "--nproc", str(RANKS), "--device", "cpu", "plain.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    subprocess.run([BIN / "instep", *words], cwd=folder, env=environ, check=True, capture_output=True, timeout=LIMIT_S)
    return time.perf_counter() - begin


def measure(repeat: int) -> dict[str, list[float]]:
    """Wall seconds of both, which take turns."""
    seconds: dict[str, list[float]] = {"instep": [], "torchrun": []}
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        (folder / "plain.py").write_text(PLAIN)
        made = at_end.enter_context(cluster(folder))
        machines = made["machines"]
        shells = [Shell(made["ssh_config"], machine["name"], folder) for machine in machines]
        for shell in shells:
            at_end.callback(shell.close)
        for turn in range(repeat + 1):
            taken = {
                "torchrun": torchrun_s(shells, machines[0]["address"], 29500 + turn),
                "instep": instep_s(made["inventory"], folder),
            }
            if turn:  # the first turn fills the caches
                for name, value in taken.items():
                    seconds[name].append(value)
            print(f"turn {turn} of {repeat}: {taken}", file=sys.stderr)
    return seconds


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=7, help="turns that count (default 7)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    seconds = measure(given.repeat)
    middle = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    result = {
        "ratio": round(middle["instep"] / middle["torchrun"], 3),
        "seconds": middle,
        "range_s": {name: [round(min(values), 3), round(max(values), 3)] for name, values in seconds.items()},
        "machines": NODES,
        "ranks_per_machine": RANKS,
        "repeat": given.repeat,
        "cores": len(os.sched_getaffinity(0)),
    }
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"join, barrier, leave on {NODES} machines, {RANKS} ranks each: seconds, medians of {given.repeat}")
    print(f"instep run --via ssh  {middle['instep']:6.2f}")
    print(f"torchrun on each      {middle['torchrun']:6.2f}")
    print(f"ratio                 {result['ratio']:6.2f}   (at most {TARGET})")


if __name__ == "__main__":
    main()
