"""How long does a practice cluster take to come and to go? As root, on a host that can carry one.

    python benchmarks/sandbox.py [--repeat 5] [--nodes 3] [--as containers|vms] [--json]

An image that is not there is made first, and that is not counted. Also measured: from `up` until Slurm runs a job on
all machines. The figures are medians of seconds; they depend on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

INSTEP = str(Path(sys.executable).with_name("instep"))
NAME = "bench"
TARGETS = {"up": 6.0}


def sandbox(*words: str) -> float:
    """Seconds that ``instep sandbox`` with these words takes."""
    begin = time.perf_counter()
    subprocess.run([INSTEP, "sandbox", *words], check=True, capture_output=True, timeout=900)
    return time.perf_counter() - begin


def turn(options: list[str], nodes: str) -> dict[str, float]:
    """One sandbox, from nothing to nothing."""
    begin = time.perf_counter()
    taken = {"up": sandbox("up", *options)}
    try:
        job = ["exec", "--name", NAME, "n1", "srun", "--nodes", nodes, "true"]
        while time.perf_counter() - begin < 120:
            try:
                sandbox(*job)
                break
            except subprocess.CalledProcessError:  # Slurm does not answer yet
                time.sleep(0.1)
        taken["up to a job of Slurm's"] = time.perf_counter() - begin
        taken["kill"] = sandbox("kill", "--name", NAME, f"n{nodes}")
        taken["start"] = sandbox("start", "--name", NAME, f"n{nodes}")
    finally:
        taken["down"] = sandbox("down", "--name", NAME)
    return taken


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=5, help="turns that count (default 5)")
    options.add_argument("--nodes", type=int, default=3, help="machines (default 3)")
    options.add_argument("--as", dest="kind", default="containers", help="containers or vms")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    words = ["--name", NAME, "--nodes", str(given.nodes), "--as", given.kind]
    turns = [turn(words, str(given.nodes)) for _ in range(given.repeat + 1)][1:]  # the first fills the caches
    middle = {what: round(statistics.median(one[what] for one in turns), 2) for what in turns[0]}
    result = {
        "seconds": middle,
        "range_s": {what: [round(pick(one[what] for one in turns), 2) for pick in (min, max)] for what in middle},
        "machines": given.nodes,
        "as": given.kind,
        "repeat": given.repeat,
        "cores": len(os.sched_getaffinity(0)),
    }
    if given.json:
        print(json.dumps(result, indent=2))
        return
    for what, seconds in middle.items():
        print(f"{what:<24} {seconds:>6.2f} s{f'   at most {TARGETS[what]:g}' if what in TARGETS else ''}")
    print(f"medians of {given.repeat}, {given.nodes} {given.kind}, {result['cores']} cores")


if __name__ == "__main__":
    main()
