"""What does a step cost beside a hand-written DDP loop? instep, ignite, Accelerate and Lightning, in one run.

    python benchmarks/overhead.py [--repeat 7] [--epochs 10] [--ranks 1 2] [--quick] [--without-peers] [--json]

An MLP so small that the loop is what takes the time (contenders.py has the programs). All take turns, each turn in
fresh processes, so that a noisy machine is noisy for all. A contender's time is the median over its epochs of 200
steps, each with its end and all that is logged; a ratio is the median over the turns of that over what the
hand-written loop took in the same turn ("whole": with the means over all epochs in place of the medians). Quote the
ratios, not the microseconds. Two tables for each number of ranks:

    ratio       batches made of a TensorDataset, by torch's DataLoader or by what stands in its place
    ratio_loop  batches that lie ready, so that nothing in the first table hides behind the data

"hand-tuned" is the hand-written loop with torch's fused optimizer and gradient_as_bucket_view, both of which instep
takes by itself: it shows how much of a ratio below 1 is due to those.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Middle = Callable[[list[float]], float]

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).with_name("contenders.py")
AT_MOST = 1.02
BASE = "hand-written"
OURS = (BASE, "instep", "hand-tuned")
PEERS = ("ignite", "accelerate", "lightning")
PACKAGES = {"instep": "instep", "ignite": "pytorch-ignite", "accelerate": "accelerate", "lightning": "lightning"}
PATHS = {"ratio": "samples", "ratio_loop": "batches"}
WIDTH = 48
# By figure, ranks and contender: a step's microseconds in each turn and epoch.
Taken = dict[tuple[str, int, str], list[list[float]]]


def step_us(contender: str, path: str, ranks: int, epochs: int, folder: Path) -> list[float]:
    """Microseconds of one step, epoch by epoch, in processes of its own.

    Raises:
        SystemExit: it failed.

    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [BIN / "instep", "run", "--device", "cpu", "--nproc", ranks, PROGRAM, contender, path, epochs, result]
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode or not result.exists():
        raise SystemExit(f"{contender} on {ranks} ranks failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    values: list[float] = json.loads(result.read_text())
    return values


def measure(contenders: list[str], ranks: list[int], epochs: int, repeat: int) -> Taken:
    """All take turns."""
    taken: Taken = {}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(repeat):
            # Whoever comes after an expensive one may find the machine hotter: the order changes from turn to turn.
            order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
            for figure, path in PATHS.items():
                for number in ranks:
                    for contender in order:
                        taken.setdefault((figure, number, contender), []).append(
                            step_us(contender, path, number, epochs, Path(name))
                        )
            print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
    return taken


def ratios(taken: Taken, middle: Middle, *where: Any) -> list[float]:
    """A contender's steps over those of the hand-written loop, turn by turn."""
    figure, ranks, contender = where
    pairs = zip(taken[figure, ranks, contender], taken[figure, ranks, BASE], strict=True)
    return [middle(one) / middle(base) for one, base in pairs]


def results(taken: Taken, contenders: list[str], ranks: list[int]) -> dict[str, Any]:
    """All figures, as --json gives them."""
    median = statistics.median
    given: dict[str, Any] = {figure: {} for figure in PATHS}
    for figure, number, contender in itertools.product(PATHS, ranks, contenders):
        where = figure, number, contender
        each = ratios(taken, median, *where)
        about = {
            "ratio": round(median(each), 3),
            "range": [round(min(each), 3), round(max(each), 3)],
            "whole": round(median(ratios(taken, statistics.fmean, *where)), 3),
            "step_us": round(median(map(median, taken[where])), 1),
        }
        of_contender = given.setdefault("contenders", {}).setdefault(contender, {})
        of_contender.setdefault(figure, {})[str(number)] = about
        if contender == "instep":
            given[figure][str(number)] = about["ratio"]
    return given


def table(result: dict[str, Any]) -> str:
    """The result for reading."""
    lines = []
    titles = {"ratio": "batches of a TensorDataset", "ratio_loop": "batches that lie ready: the loop alone"}
    for figure, title in titles.items():
        for ranks in result["ranks"]:
            word = "rank" if ranks == 1 else "ranks"
            head = f"{title}, {ranks} {word}"
            lines.append(f"{head:<{WIDTH + 2}} {'µs a step':>9} {'of hand-written':>15} {'whole':>7} {'turns':>13}")
            for name in (*OURS, *PEERS):
                if name not in result["contenders"]:
                    lines.append(f"  {name:<{WIDTH}} not measured: {result['missing'].get(name, 'not asked for')}")
                    continue
                about = result["contenders"][name][figure][str(ranks)]
                least, most = about["range"]
                spread = f"{least:.2f} - {most:.2f}"
                wanted = f"   at most {AT_MOST}" if name == "instep" else ""
                lines.append(
                    f"  {name:<{WIDTH}} {about['step_us']:>9.0f} {about['ratio']:>15.3f} {about['whole']:>7.2f} "
                    f"{spread:>13}{wanted}"
                )
            lines.append("")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines.append(
        f"medians of {result['repeat']} turns of {result['epochs']} epochs, {result['cores']} cores; {versions}"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=7, help="turns (default 7)")
    options.add_argument("--epochs", type=int, default=10, help="of 200 steps, in each (default 10)")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    options.add_argument("--quick", action="store_true", help="2 turns of 2 epochs: whether it runs, not how fast")
    options.add_argument("--without-peers", action="store_true", help="instep and the hand-written loops only")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given = options.parse_args()
    if given.quick:
        given.repeat, given.epochs = 2, 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, at any number of ranks
    peers = [] if given.without_peers else list(PEERS)
    missing = {name: f"no {PACKAGES[name]} here" for name in peers if importlib.util.find_spec(name) is None}
    contenders = [*OURS, *(name for name in peers if name not in missing)]
    measured = results(measure(contenders, given.ranks, given.epochs, given.repeat), contenders, given.ranks)
    about = {"torch": "torch"} | {name: PACKAGES[name] for name in contenders if name in PACKAGES}
    result = {
        **measured,
        "missing": missing,
        "versions": {name: importlib.metadata.version(package) for name, package in about.items()},
        "ranks": given.ranks,
        "repeat": given.repeat,
        "epochs": given.epochs,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result, indent=2) if given.json else table(result))


if __name__ == "__main__":
    main()
