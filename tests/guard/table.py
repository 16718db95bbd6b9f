"""The table of all cases: ``python -m tests.guard.table [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.guard import cases, controls
from tests.launch.jobs import INSTEP

VISION = Path(__file__).parents[2] / ".venv-vision" / "bin" / "instep"  # where the other trainers are


def main() -> int:
    """Run the cases and the controls, print a line for each, and say whether enough are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases or controls; all if none")
    parser.add_argument("--texts", type=Path, help="a folder to write what each run printed")
    args = parser.parse_args()
    peers = cases.find(cases.PEERS)
    chosen = [case for case in [*cases.find(), *peers] if not args.names or case.name in args.names]
    outcomes = []
    if chosen:
        print(cases.HEADING)
    for case in chosen:
        outcomes.append(cases.run(case, instep=str(VISION) if case in peers else INSTEP))
        _keep(args.texts, case.name, outcomes[-1].text)
        print(outcomes[-1].row(), flush=True)
    ended = []
    alone = [control for control in controls.find() if not args.names or control.name in args.names]
    if alone:
        print(f"\n{'control':24} {'ends well':>9}")
    for control in alone:
        result = controls.run(control)
        ended.append(result.well)
        _keep(args.texts, control.name, result.text)
        print(f"{control.name:24} {'yes' if result.well else 'NO':>9}   exit {result.rc}", flush=True)
    return _conclude(outcomes, ended)


def _conclude(outcomes: list[cases.Outcome], ended: list[bool]) -> int:
    fine = True
    if outcomes:
        ranks = sum(one.rank_right for one in outcomes) / len(outcomes)
        lines = sum(one.line_right for one in outcomes) / len(outcomes)
        kinds = sum(one.kind_right for one in outcomes) / len(outcomes)
        seconds = sorted(one.seconds for one in outcomes if one.seconds is not None)
        middle = f"{seconds[len(seconds) // 2]:.1f} s, at most {seconds[-1]:.1f} s" if seconds else "-"
        print(
            f"\n{len(outcomes)} cases: rank right {ranks:.0%}, line right {lines:.0%}, kind right {kinds:.0%}; median {middle}"
        )
        fine = ranks >= 0.95 and lines >= 0.85
    if ended:
        print(f"{len(ended)} controls: {ended.count(False)} false kills")
        fine = fine and all(ended)
    return 0 if fine else 1


def _keep(folder: Path | None, name: str, text: str) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
