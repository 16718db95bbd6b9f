"""How long does a checkpoint hold the training thread? instep beside torch.save and dcp.async_save, in one run.

    python benchmarks/checkpoint.py [--ranks 1] [--size 400] [--repeat 7] [--json]

The state is that of a model with Adam: parameters and two moments of each, fp32, the same on all ranks as under DDP.
The ways take turns, so that a noisy machine is noisy for all; the figures are medians over the turns, and those of the
slowest rank. Quote the ratios, not the seconds. The first asynchronous save pays for its memory and is given apart:
CheckpointFolder.prepare() moves that cost to before the training.

torch.save does not wait for the disk, hide the file until it is whole, or take checksums; instep does all three.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import instep
from instep.train.checkpoints import CheckpointFolder

if TYPE_CHECKING:
    from collections.abc import Callable

AT_MOST = 0.15  # of torch.save's time
LAYERS = 24
State = dict[str, Any]


def adam_like(megabytes: float) -> State:
    """Parameters and two moments of each, `megabytes` in all."""
    each = int(megabytes * 1e6 / 4 / 3 / LAYERS)
    torch.manual_seed(0)
    model = {f"layer.{number}.weight": torch.randn(each) for number in range(LAYERS)}
    moments = {
        key: {"exp_avg": torch.randn(each), "exp_avg_sq": torch.rand(each), "step": torch.tensor(1.0)} for key in model
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(model)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def seconds(work: Callable[[], object]) -> float:
    """How long something takes, on the slowest rank, from a common start."""
    instep.barrier("start")
    begin = time.perf_counter()
    work()
    return float(instep.agree(time.perf_counter() - begin, how="max"))


def peak_mb() -> float:
    """Highest memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def torch_save(state: State, folder: Path) -> dict[str, float]:
    """What people write: the main rank saves, the others wait."""

    def work() -> None:
        if instep.is_main():
            torch.save(state, folder / "all.pt")
        instep.barrier("saved")

    return {"stall": seconds(work)}


class PlainAsync:
    """dcp.async_save as its documentation shows it, but for a group of its own: training talks on the other one."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo") if instep.world_size() > 1 else None

    def __call__(self, state: State, folder: Path) -> dict[str, float]:
        """One save: {"stall": seconds, "total": seconds}."""
        running: list[Any] = []

        def begin() -> None:
            target = folder / "dcp"
            running.append(
                dcp.async_save(state, checkpoint_id=target, process_group=self.group, no_dist=self.group is None)
            )

        stall = seconds(begin)
        return {"stall": stall, "total": stall + seconds(running[0].result)}


class Ours:
    """instep's folder, one for all turns: its memory and its line between the ranks are made once."""

    def __init__(self, folder: Path, *, asynchronous: bool) -> None:
        self.folder = CheckpointFolder(folder, keep=1, asynchronous=asynchronous)
        self.step = 0

    def __call__(self, state: State, _: Path) -> dict[str, float]:
        """One save: {"stall": seconds, "total": seconds}."""
        self.step += 1
        stall = seconds(lambda: self.folder.save(self.step, state, {}, {}, {}))
        rest = seconds(self.folder.wait)
        if self.folder.failure is not None:
            raise self.folder.failure
        return {"stall": stall, "total": stall + rest}


def work(megabytes: float, repeat: int, place: str) -> None:
    """What every rank does; the main one prints the figures."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing checkpoint")
    with instep.init(device="cpu"):
        folder = Path(place)
        state = adam_like(megabytes)
        memory = {"with the state": peak_mb()}
        ways: dict[str, Callable[[State, Path], dict[str, float]]] = {"torch.save": torch_save}
        ways["instep, synchronous"] = Ours(folder / "sync", asynchronous=False)
        ways["instep, asynchronous"] = Ours(folder / "async", asynchronous=True)
        ways["dcp.async_save"] = PlainAsync()
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(repeat + 1):
            for name, way in ways.items():
                turns[name].append(way(state, folder))
                if turn == 0:
                    memory[f"after {name}"] = peak_mb()
            if instep.is_main():
                print(f"turn {turn} of {repeat}", file=sys.stderr)
        for way in ways.values():
            if isinstance(way, Ours):
                way.folder.close()
        if instep.is_main():
            figures = {"turns": turns, "memory_mb": memory, "ranks": instep.world_size()}
            (folder / "figures.json").write_text(json.dumps(figures))


def launch(ranks: int, megabytes: float, repeat: int, place: str) -> dict[str, Any]:
    """Run :func:`work` on this many ranks and take up what the main one has written."""
    command = [sys.executable, __file__, "--worker", place, "--size", str(megabytes), "--repeat", str(repeat)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": threads,
    }
    started = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit("a rank failed")
    figures: dict[str, Any] = json.loads((Path(place) / "figures.json").read_text())
    return figures


def conclude(figures: dict[str, Any], megabytes: float, repeat: int) -> dict[str, Any]:
    """Ratios and medians. The first turn fills the caches and does not count, but for first_stall_s."""
    turns: dict[str, list[dict[str, float]]] = figures["turns"]

    def middle(name: str, what: str) -> float:
        return round(statistics.median(turn[what] for turn in turns[name][1:]), 4)

    def ratio(name: str, what: str) -> float:
        pairs = zip(turns[name][1:], turns["torch.save"][1:], strict=True)
        return round(statistics.median(one[what] / base["stall"] for one, base in pairs), 3)

    first = turns["instep, asynchronous"][0]["stall"]
    base = middle("torch.save", "stall")
    return {
        "stall_ratio": ratio("instep, asynchronous", "stall"),
        "first_stall_ratio": round(first / base, 3),
        "ranks": figures["ranks"],
        "state_mb": megabytes,
        "torch_save_s": base,
        "stall_s": {name: middle(name, "stall") for name in turns if name != "torch.save"},
        "total_s": {name: middle(name, "total") for name in turns if name != "torch.save"},
        "ratios": {name: ratio(name, "stall") for name in turns if name != "torch.save"},
        "first_stall_s": {name: round(turns[name][0]["stall"], 4) for name in turns},
        "peak_memory_mb": {name: round(value) for name, value in figures["memory_mb"].items()},
        "repeat": repeat,
        "cores": len(os.sched_getaffinity(0)),
    }


def table(result: dict[str, Any]) -> str:
    """The result for reading."""
    base = result["torch_save_s"]
    head = f"{result['state_mb']:g} MB on {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}"
    lines = [f"{head:<24}{'holds training':>16}{'of torch.save':>15}{'first time':>12}{'until it stands':>17}"]
    lines.append(
        f"{'torch.save':<24}{base:>14.3f} s{1:>15.2f}{result['first_stall_s']['torch.save']:>10.3f} s{base:>15.3f} s"
    )
    for name, stall in result["stall_s"].items():
        first, total = result["first_stall_s"][name], result["total_s"][name]
        lines.append(f"{name:<24}{stall:>14.3f} s{result['ratios'][name]:>15.2f}{first:>10.3f} s{total:>15.3f} s")
    lines.append(f"instep, asynchronous: {result['stall_ratio']} of torch.save's time (at most {AT_MOST})")
    lines.append(
        "peak memory of the main rank, MB: " + ", ".join(f"{k} {v}" for k, v in result["peak_memory_mb"].items())
    )
    lines.append(f"medians of {result['repeat']} paired turns, {result['cores']} cores")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    options.add_argument("--size", type=float, default=400, help="megabytes of the state (default 400)")
    options.add_argument("--repeat", type=int, default=7, help="turns that count (default 7)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.size, given.repeat, given.worker)
        return
    place = tempfile.mkdtemp(prefix="instep-bench-", dir=Path.cwd())  # the disk that people train on, not /tmp
    try:
        result = conclude(launch(given.ranks, given.size, given.repeat, place), given.size, given.repeat)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(result, indent=2) if given.json else table(result))


if __name__ == "__main__":
    main()
