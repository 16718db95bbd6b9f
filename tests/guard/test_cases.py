"""The guard on programs that fall out of step: some of each kind here, all of them by ``make guard-table``."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.guard import cases
from tests.launch.jobs import INSTEP

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT_S = 10.0
SOME = (
    "asleep_elsewhere",
    "barrier_except_last",
    "comprehension",
    "early_return",
    "group_cycle",
    "holds_everything",
    "main_only_barrier",
    "metric_order",
    "nan_skip",
    "shape_mismatch",
    "sharded_state_on_main",
    "stale_lock",
    "swallowed_exception",
)
PEERS = cases.HERE / "peers"
PEERS_INSTEP = Path(__file__).parents[2] / ".venv-peers" / "bin" / "instep"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[cases.Outcome]]]:
    """Of the cases to come: a few run at a time, since most of their time is waiting."""
    every = {case.name: case for case in cases.find()}
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(cases.run, every[name], tmp_path_factory.mktemp(name)) for name in SOME}


@pytest.mark.parametrize("name", SOME)
def test_rank_and_line_are_right(name: str, outcomes: dict[str, Future[cases.Outcome]]) -> None:
    outcome = outcomes[name].result()
    assert (outcome.rank_right, outcome.line_right) == (True, True), f"{outcome.row()}\n{outcome.text}"


def test_report_of_the_skipped_step(tmp_path: Path) -> None:
    (case,) = [case for case in cases.find() if case.name == "nan_skip"]
    outcome = cases.run(case, tmp_path)
    assert outcome.rc == cases.OUT_OF_STEP, outcome.text
    assert outcome.seconds is not None
    assert outcome.seconds < PROMPT_S
    (folder,) = (tmp_path / "runs").iterdir()
    again = run_command([INSTEP, "why", folder, "--json"], limit_s=30).ok()
    assert json.loads(again.out) == outcome.desync
    assert sorted(path.name for path in (folder / "stacks").iterdir()) == [f"rank-{n}.txt" for n in range(3)]
    assert "ranks out of step" in outcome.text
    assert "left the common path" in outcome.text


def test_every_case_says_what_is_true_of_it() -> None:
    found = cases.find()
    assert len(found) >= 60
    for case in [*found, *cases.find(PEERS)]:
        assert all(rank < case.nproc for ranks in case.ranks for rank in ranks), case
        assert set(case.kinds) <= {"mismatch", "missing", "extra", "cycle", "dead", "blocked"}, case


def test_what_counts_as_right() -> None:
    case = replace(cases.read(cases.HERE / "nan_skip.py"), kinds=("missing",), ranks=((1,), (0, 1)))
    ((file, line),) = case.lines
    said = {"kind": "missing", "ranks": [1], "left_at": {"file": file, "line": line}, "detected_after_s": 1.0}
    right = cases.Outcome(case, 86, said)
    assert (right.rank_right, right.line_right, right.kind_right) == (True, True, True)
    assert replace(right, desync=said | {"ranks": [0, 1]}).rank_right
    assert not replace(right, desync=said | {"ranks": [0]}).rank_right
    assert not replace(right, desync=said | {"left_at": {"file": file, "line": line + 1}}).line_right
    assert not replace(right, desync=said | {"left_at": None}).line_right
    assert not replace(right, rc=1).rank_right
    assert not replace(right, desync={}).line_right
    silent = replace(right, case=replace(case, silent=True, lines=frozenset()), rc=0, desync=said | {"left_at": None})
    assert (silent.rank_right, silent.line_right) == (True, True)


@pytest.mark.skipif(
    not PEERS_INSTEP.exists(), reason="no environment with other trainers: `make bench-overhead` makes it"
)
@pytest.mark.parametrize("case", cases.find(PEERS), ids=lambda case: case.name)
def test_line_is_the_users_and_not_the_librarys(case: cases.Case, tmp_path: Path) -> None:
    outcome = cases.run(case, tmp_path, instep=str(PEERS_INSTEP))
    assert (outcome.rank_right, outcome.line_right) == (True, True), f"{outcome.row()}\n{outcome.text}"
