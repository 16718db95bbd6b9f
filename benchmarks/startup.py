"""How long does a job take that only joins, passes a barrier and leaves? `instep run` beside torchrun, in one run.

    python benchmarks/startup.py [--repeat 10] [--json]

The commands take turns, so that a noisy machine is noisy for all; the figures are medians. Quote the ratios, not the
seconds. Also measured: `instep --help`, and what `instep.init()` adds to plain `init_process_group`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
TARGETS = {"ratio, 2 ranks": 0.5, "ratio, 8 ranks": 0.25, "instep --help, s": 0.25, "joining adds, ms": 50.0}
JOINS = 20  # in one process, each way

PLAIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""

# Two ranks join and leave again and again, plain and with instep in turn, each time at a new port, from a common
# start; a join has taken as long as the slower rank says.
JOIN = """
import json, os, sys, time
import torch.distributed as dist
import instep

rank, ports = int(os.environ["RANK"]), json.loads(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
ways = {
    "plain": (lambda url: dist.init_process_group("gloo", url, rank=rank, world_size=2), dist.destroy_process_group),
    "instep": (lambda url: instep.init(url, backend="gloo"), instep.close),
}
taken = {"plain": [], "instep": []}
for number, port in enumerate(ports):
    way = ("plain", "instep")[number % 2]
    join, leave = ways[way]
    store.set(f"ready {number} {rank}", "")
    store.wait([f"ready {number} {1 - rank}"])
    begin = time.perf_counter()
    join(f"tcp://127.0.0.1:{port}")
    store.set(f"took {number} {rank}", str(time.perf_counter() - begin))
    dist.barrier()
    leave()
    taken[way].append(max(float(store.get(f"took {number} {one}")) for one in (0, 1)))
    store.set(f"left {number} {rank}", "")
    store.wait([f"left {number} {1 - rank}"])
if rank == 0:
    print(json.dumps(taken))
"""


def wall_s(*words: object, cwd: Path) -> float:
    """Seconds from the start of a command to its end."""
    begin = time.perf_counter()
    subprocess.run([str(word) for word in words], cwd=cwd, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - begin


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, outside the range that the kernel hands out by itself."""
    found: list[int] = []
    for port in range(20_000, 30_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
        if len(found) == count:
            break
    return found


def start_up(folder: Path, repeat: int) -> dict[str, list[float]]:
    """Wall seconds of every command, which take turns."""
    script = folder / "plain.py"
    script.write_text(PLAIN)
    commands: dict[str, list[object]] = {"help": [BIN / "instep", "--help"]}
    for ranks in (2, 8):
        commands[f"instep {ranks}"] = [BIN / "instep", "run", "--nproc", ranks, "--device", "cpu", script]
        commands[f"torchrun {ranks}"] = [BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}", script]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name, words in commands.items():
            taken = wall_s(*words, cwd=folder)
            if turn:  # the first turn fills the caches
                seconds[name].append(taken)
        print(f"turn {turn} of {repeat}", file=sys.stderr)
    return seconds


def join_ms(folder: Path) -> dict[str, float]:
    """Milliseconds of a join, plain and with instep; the first of each pays for its imports and is left out."""
    script = folder / "join.py"
    script.write_text(JOIN)
    ports = json.dumps(free_ports(2 * JOINS + 2))
    done = subprocess.run(
        [BIN / "instep", "run", "--nproc", "2", "--device", "cpu", script, ports],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        timeout=300,
    )
    taken: dict[str, list[float]] = json.loads(done.stdout)
    return {way: 1000 * statistics.median(values[1:]) for way, values in taken.items()} | {
        f"first {way}": 1000 * values[0] for way, values in taken.items()
    }


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=10, help="turns that count (default 10)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, said without its warning
    with tempfile.TemporaryDirectory() as name:
        seconds = start_up(Path(name), given.repeat)
        joins = join_ms(Path(name))
    middle = {command: round(statistics.median(values), 3) for command, values in seconds.items()}
    ratio = {str(ranks): round(middle[f"instep {ranks}"] / middle[f"torchrun {ranks}"], 3) for ranks in (2, 8)}
    result = {
        "ratio": ratio,
        "help_s": middle["help"],
        "join_overhead_ms": round(joins["instep"] - joins["plain"], 2),
        "join_ms": {way: round(value, 2) for way, value in joins.items()},
        "seconds": middle,
        "range_s": {command: [round(min(values), 3), round(max(values), 3)] for command, values in seconds.items()},
        "repeat": given.repeat,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result, indent=2) if given.json else table(result))


def table(result: dict[str, object]) -> str:
    """The result for reading."""
    ratio, seconds, joins = result["ratio"], result["seconds"], result["join_ms"]
    assert isinstance(ratio, dict)
    assert isinstance(seconds, dict)
    assert isinstance(joins, dict)
    lines = ["join, barrier, leave        instep run    torchrun    ratio    at most"]
    for ranks in ("2", "8"):
        ours, theirs = seconds[f"instep {ranks}"], seconds[f"torchrun {ranks}"]
        most = TARGETS[f"ratio, {ranks} ranks"]
        lines.append(f"{ranks} ranks, seconds          {ours:>10.2f}  {theirs:>10.2f}  {ratio[ranks]:>7.2f}  {most:>9}")
    most = TARGETS["instep --help, s"]
    lines.append(f"instep --help, seconds      {result['help_s']:>10}  {'':>10}  {'':>7}  {most:>9}")
    added = f"{joins['instep']:.1f} - {joins['plain']:.1f} = {result['join_overhead_ms']}"
    lines.append(f"instep.init() beside init_process_group, ms: {added} (at most {TARGETS['joining adds, ms']:g})")
    lines.append(f"medians of {result['repeat']}, {result['cores']} cores")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
