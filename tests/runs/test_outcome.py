"""Exit codes of the ranks -> the outcome of the run."""

from __future__ import annotations

import pytest

from instep.runs import Outcome, exit_code_of, judge


@pytest.mark.parametrize(
    ("codes", "first", "signal", "outcome", "code"),
    [
        ([0, 0], None, None, Outcome.FINISHED, 0),
        ([], None, None, Outcome.FINISHED, 0),
        ([143, 1], 1, None, Outcome.FAILED, 1),
        ([143, 137], 137, None, Outcome.FAILED, 137),
        ([86, 143], 86, None, Outcome.OUT_OF_STEP, 86),
        ([75, 75], None, None, Outcome.PREEMPTED, 75),
        ([75, 0], None, None, Outcome.PREEMPTED, 75),
        ([75, 75], None, 15, Outcome.PREEMPTED, 75),
        ([75, 1], 1, None, Outcome.FAILED, 1),
        ([130, 130], None, 2, Outcome.INTERRUPTED, 130),
        ([0, 0], None, 2, Outcome.INTERRUPTED, 130),
        ([143, 1], None, 15, Outcome.INTERRUPTED, 143),
        ([75, 137], None, 15, Outcome.INTERRUPTED, 143),
        ([129], None, 1, Outcome.INTERRUPTED, 129),
        ([0, 3], None, None, Outcome.FAILED, 3),
    ],
)
def test_outcome(codes: list[int], first: int | None, signal: int | None, outcome: Outcome, code: int) -> None:
    assert judge(codes, first_failure=first, signal=signal) == (outcome, code)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (13, 13), (-9, 137), (-11, 139)])
def test_exit_code_of(status: int, code: int) -> None:
    assert exit_code_of(status) == code
