"""The guard on programs that fall out of step: some of each kind here, all of them by ``make guard-table``."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.commands import run_command
from tests.guard import cases
from tests.launch.jobs import INSTEP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT_S = 10.0
SUSPECT = ("--guard-suspect", "3")  # and not eight seconds, with which `make guard-table` runs them
SOME = (
    "asleep_elsewhere",
    "barrier_except_last",
    "early_return",
    "group_cycle",
    "holds_everything",
    "metric_order",
    "nan_skip",
    "shape_mismatch",
    "sharded_state_on_main",
    "stale_lock",
    "swallowed_exception",
)
SOME_PEERS = ("accelerate_gather_on_main", "lightning_stop_local")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each case has a folder of its name."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Iterator[dict[str, Future[cases.Outcome]]]:
    """Of the cases to come: a few run at a time, since most of their time is waiting."""
    every = {case.name: case for case in cases.find()}
    with ThreadPoolExecutor(3) as pool:
        found = {}
        for name in SOME:
            (folder / name).mkdir()
            found[name] = pool.submit(cases.run, every[name], folder / name, *SUSPECT)
        yield found


@pytest.mark.parametrize("name", SOME)
def test_rank_and_line_are_right(name: str, outcomes: dict[str, Future[cases.Outcome]]) -> None:
    outcome = outcomes[name].result()
    assert (outcome.rank_right, outcome.line_right) == (True, True), f"{outcome.row()}\n{outcome.text}"


def test_report_of_the_skipped_step(folder: Path, outcomes: dict[str, Future[cases.Outcome]]) -> None:
    outcome = outcomes["nan_skip"].result()
    assert outcome.rc == cases.OUT_OF_STEP, outcome.text
    assert outcome.seconds is not None
    assert outcome.seconds < PROMPT_S
    (run,) = (folder / "nan_skip" / "runs").iterdir()
    again = run_command([INSTEP, "why", run, "--json"], limit_s=30).ok()
    assert json.loads(again.out) == outcome.desync
    assert sorted(path.name for path in (run / "stacks").iterdir()) == [f"rank-{n}.txt" for n in range(3)]
    assert "ranks out of step" in outcome.text
    assert "left the common path" in outcome.text


def test_every_case_says_what_is_true_of_it() -> None:
    found = cases.find()
    assert len(found) >= 60
    for case in [*found, *cases.find(cases.PEERS)]:
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


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Future[cases.Outcome]]]:
    """Of programs of other trainers, under another torch."""
    instep = str(needs.need_vision() / "instep")
    every = {case.name: case for case in cases.find(cases.PEERS)}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(cases.run, every[name], None, *SUSPECT, instep=instep) for name in SOME_PEERS}


@pytest.mark.parametrize("name", SOME_PEERS)
def test_line_is_the_users_and_not_the_librarys(name: str, peers: dict[str, Future[cases.Outcome]]) -> None:
    outcome = peers[name].result()
    assert (outcome.rank_right, outcome.line_right) == (True, True), f"{outcome.row()}\n{outcome.text}"
