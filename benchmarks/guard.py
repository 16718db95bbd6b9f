"""What does it cost to be watched? A step of 5 ms with 50 collectives, with the recorder and without, in one run.

    python benchmarks/guard.py [--blocks 30] [--steps 60] [--ranks 1 2] [--quick] [--json]

Recording: the ranks take blocks of steps in turn with the recorder at rest, at work, and beating 40 times as often as
it does, in the same processes and groups. A step is 50 small all-reduces, plus computing until 5 ms are full (longer
where the collectives alone take longer: then the overhead is told of that step, and of 5 ms as well). What a recorded
block takes longer than the unrecorded one beside it is a share of the step; medians over the blocks. At its own pace
that share ("paired") is below the noise of most machines, so "overhead" is that of the frequent beats, divided by 40:
the largest of all numbers of ranks. A step that took more than twice the median counts as twice the median: a beat
cannot take a whole step. "beat_us" is how long one beat holds the interpreter's lock.

Watching: 8 ranks beat for some seconds, and the watch looks at them in a process of its own: "watch" is the share of
one core that it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
STEP_S, COLLECTIVES = 0.005, 50
AT_MOST = 0.01
OFTEN = 40  # times the recorder's own pace
EVERY_S = 0.25  # the watch looks so often

# One rank. It gets: folder, blocks, steps of a block, where the main rank writes what it measured.
RECORDING = """
import json, os, statistics, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from instep.guard import recorder

folder, blocks, steps, result = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
step_s, collectives = float(sys.argv[5]), int(sys.argv[6])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
tensor, matrix = torch.ones(16), torch.ones(64, 64)

def communicate():
    for _ in range(collectives):
        dist.all_reduce(tensor)

def step(rounds):
    communicate()
    for _ in range(rounds):
        torch.mm(matrix, matrix)

def took(work, *args):
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin

def compute(rounds):
    for _ in range(rounds):
        torch.mm(matrix, matrix)

compute(100), communicate()
alone = statistics.median(took(communicate) for _ in range(50))
one = statistics.median(took(compute, 20) for _ in range(20)) / 20
rounds = torch.tensor(max(0, round((step_s - alone) / one)))
dist.broadcast(rounds, 0)
now_s = statistics.median(took(step, int(rounds)) for _ in range(10))
count = torch.tensor(max(5, min(steps, int(0.4 / now_s))))  # on a machine that others load, too, it ends in time
dist.broadcast(count, 0)
steps = int(count)
rec = recorder.start(folder, rank, facts_every_s=60.0)
times = {"off": [], "on": [], "often": []}
pace_s, often_s = rec._every_s, rec._every_s / float(sys.argv[7])

def block(which):
    rec.pause()
    rec._every_s = often_s if which == "often" else pace_s
    time.sleep(pace_s)  # until the pace before this one is over
    if which != "off":
        rec.resume()
    dist.barrier()
    each = [took(step, int(rounds)) for _ in range(steps)]
    most = 2 * statistics.median(each)
    times[which].append(statistics.fmean(min(one, most) for one in each))

for number in range(blocks + 1):
    for which in list(times)[:: 1 - 2 * (number % 2)]:  # there and back
        block(which)
rec.pause()
time.sleep(0.3)
beats = []

def measure():
    for _ in range(500):
        beats.append(took(rec._beat))

# From a thread of its own, as in a run, while the main thread waits.
thread = threading.Thread(target=measure)
thread.start(); thread.join()
if rank == 0:
    told = {which: values[1:] for which, values in times.items()}  # the first ones warm up
    about = {"beat_us": statistics.median(beats) * 1e6, "collectives_s": alone, "steps": steps}
    result.write_text(json.dumps({**told, **about}))
dist.barrier()
dist.destroy_process_group()
"""

# A rank that beats, and never stands still.
BEATING = """
import sys, time
from pathlib import Path
from instep.guard import recorder
recorder.start(Path(sys.argv[1]), int(sys.argv[2]))
def deep(levels):
    if levels:
        return deep(levels - 1)
    while True:
        time.sleep(0.03)
        time.sleep(0.05)
        time.sleep(0.07)
deep(20)
"""

# The watch while all is well, and what it took of a core.
WATCHING = """
import json, sys, time
from pathlib import Path
from instep.guard.watch import Watch
folder, seconds, every_s, pids = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
pids = dict(enumerate(pids))
watch = Watch(folder, len(pids), "here", suspect_s=8.0)
watch.look(pids, {})
begin, used = time.monotonic(), time.process_time()
while time.monotonic() - begin < seconds:
    time.sleep(every_s)
    assert watch.look(pids, {}) is None
print((time.process_time() - used) / (time.monotonic() - begin))
"""


def recording(ranks: int, blocks: int, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step in each block, with the recorder and without.

    Raises:
        SystemExit: it failed.

    """
    script, result = folder / "recording.py", folder / "result.json"
    script.write_text(RECORDING)
    result.unlink(missing_ok=True)
    words = [folder, blocks, steps, result, STEP_S, COLLECTIVES, OFTEN]
    command = [BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}", script, *words]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=600)
    if done.returncode or not result.exists():
        raise SystemExit(f"{ranks} ranks failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def about(told: dict[str, Any]) -> dict[str, Any]:
    """The figures of one number of ranks."""
    off = statistics.median(told["off"])
    often = [(one - base) / OFTEN for one, base in zip(told["often"], told["off"], strict=True)]
    paired = [one - base for one, base in zip(told["on"], told["off"], strict=True)]
    added, spread = statistics.median(often), statistics.quantiles(often, n=4)
    return {
        "overhead": round(added / off, 5),
        "overhead_of_5_ms": round(added / STEP_S, 5),
        "quartiles": [round(spread[0] / off, 5), round(spread[2] / off, 5)],
        "paired": round(statistics.median(paired) / off, 5),
        "step_ms": round(1000 * off, 3),
        "collectives_ms": round(1000 * told["collectives_s"], 3),
        "steps": told["steps"],
        "beat_us": round(told["beat_us"], 1),
    }


def watching(ranks: int, seconds: float, folder: Path) -> float:
    """The share of a core that looking after so many ranks takes."""
    beating = [subprocess.Popen([sys.executable, "-c", BEATING, str(folder), str(rank)]) for rank in range(ranks)]
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("rank-*.beat"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = json.dumps([process.pid for process in beating])
        words = [sys.executable, "-c", WATCHING, str(folder), str(seconds), str(EVERY_S), pids]
        return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    finally:
        for process in beating:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--blocks", type=int, default=30, help="of each kind (default 30)")
    options.add_argument("--steps", type=int, default=60, help="of a block (default 60)")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    options.add_argument("--quick", action="store_true", help="few and short blocks: whether it runs, not how fast")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    if given.quick:
        given.blocks, given.steps = 4, 40
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, said without its warning
    each = {}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where a job's folder lies, too
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory(dir=memory) as name:
            each[str(ranks)] = about(recording(ranks, given.blocks, given.steps, Path(name)))
        print(f"{ranks} ranks measured", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=memory) as name:
        watch = watching(8, 2.0 if given.quick else 10.0, Path(name))
    result = {
        "overhead": max(one["overhead"] for one in each.values()),
        "watch": round(watch, 5),
        "ranks": each,
        "blocks": given.blocks,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result, indent=2) if given.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The result for reading."""
    lines = ["recording      a step, ms  overhead   of 5 ms         quartiles    paired  a beat, µs  at most"]
    for ranks, one in result["ranks"].items():
        spread = " to ".join(f"{share:.3%}" for share in one["quartiles"])
        lines.append(
            f"{ranks + (' rank' if ranks == '1' else ' ranks'):<14} {one['step_ms']:>10.2f} {one['overhead']:>9.3%}"
            f" {one['overhead_of_5_ms']:>9.3%} {spread:>17} {one['paired']:>9.2%}"
            f" {one['beat_us']:>11.0f} {AT_MOST:>8.0%}"
        )
    lines.append(f"watching 8 ranks: {result['watch']:.2%} of one core   at most {AT_MOST:.0%}")
    lines.append(f"{result['blocks']} blocks of each kind, {result['cores']} cores")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
