"""A verdict -> the words on the screen, and the object of desync.json and back."""

from __future__ import annotations

import json

import pytest

from instep.guard import report
from instep.guard.verdicts import Kind, LeftAt, Verdict, Waiting

VERDICT = Verdict(
    kind="mismatch",
    proven=True,
    ranks=(1,),
    left_at=LeftAt("train.py", 41, "main", "if not torch.isfinite(loss): continue"),
    values={0: "not isfinite(loss): False", 1: "not isfinite(loss): True", 2: "not isfinite(loss): False"},
    waiting=(
        Waiting(0, "all_reduce", 118, (1048576,), "Float", "0", "train.py", 43, "loss.backward()"),
        Waiting(1, "all_reduce", 118, (4,), "Float", "0", "train.py", 52, "evaluate()"),
        Waiting(2, "all_reduce", 118, (1048576,), "Float", "0", "train.py", 43, "loss.backward()"),
    ),
)


def test_the_report() -> None:
    assert report.text(VERDICT, 1.44, end="job ended").splitlines() == [
        "✗ ranks out of step — 1.4 s after it happened",
        "  rank 1 left the common path at train.py:41   if not torch.isfinite(loss): continue   not isfinite(loss): True on rank 1, False on ranks 0, 2",
        "  ranks 0, 2 wait in all_reduce #118 [1048576] float32, from train.py:43 loss.backward()",
        "  rank 1     waits in all_reduce #118 [4] float32, from train.py:52 evaluate()",
        "  job ended",
    ]


def test_without_a_line_there_is_a_reason_and_no_guess() -> None:
    said = report.text(
        Verdict("blocked", proven=False, ranks=(2,), reason="rank 2 sleeps in flock", evidence=("a\nb",))
    )
    assert said.splitlines() == [
        "✗ ranks out of step, as it seems: none of them moves",
        "  rank 2 sleeps in flock",
        "  a",
        "  b",
    ]


def test_where_a_rank_is_that_is_in_no_collective() -> None:
    places = (
        Waiting(0, "", None, None, "", "", "train.py", 7, "queue.get()"),
        Waiting(1, "", None, None, "", "", "", 0),
        Waiting(2, "all_reduce", 3, (), "Long", "model", "train.py", 9),
    )
    said = report.text(Verdict("missing", proven=True, ranks=(0,), waiting=places)).splitlines()
    assert said[1:] == [
        "  rank 0 is at train.py:7 queue.get()",
        "  rank 1 has ended, or gives no sign",
        "  rank 2 waits in all_reduce #3 [] int64 of group model, from train.py:9",
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ""),
        ({0: "True"}, "True on rank 0"),
        ({0: "n: 3", 1: "n: 4", 2: "n: 3"}, "n: 4 on rank 1, 3 on ranks 0, 2"),
        ({0: "a['x: y']: 3", 1: "a['x: y']: 4"}, "a['x: y']: 3 on rank 0, 4 on rank 1"),
        ({0: "n: 3", 1: "m: 4"}, "n: 3 on rank 0, m: 4 on rank 1"),
    ],
)
def test_values(values: dict[int, str], words: str) -> None:
    assert report.values_words(values) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([2, 0], "ranks 0, 2"),
        ([0, 1], "ranks 0, 1"),
        ([7, 3, 2, 1, 0], "ranks 0-3, 7"),
        ([], "ranks "),
    ],
)
def test_ranks(ranks: list[int], words: str) -> None:
    assert report.rank_words(ranks) == words


def test_a_silent_fault_is_no_hang() -> None:
    said = report.text(Verdict("mismatch", proven=True, ranks=(1,), silent=True, reason="another seed"))
    assert said.startswith("! ranks differ")
    assert "out of step" not in said


def test_desync_json_and_back() -> None:
    values = report.as_json(VERDICT, 1.4444)
    assert list(values)[:6] == ["kind", "ranks", "left_at", "values", "waiting", "detected_after_s"]
    assert values["values"]["1"] == "not isfinite(loss): True"
    assert values["waiting"][1] | {"source": ""} == {
        "rank": 1, "op": "all_reduce", "index": 118, "shape": (4,), "dtype": "float32", "group": "0",
        "file": "train.py", "line": 52, "source": "",
    }  # fmt: skip
    again = json.loads(json.dumps(values))
    assert report.as_json(*report.from_json(again)) | {"waiting": again["waiting"]} == values | {
        "waiting": again["waiting"]
    }
    assert report.text(*report.from_json(again)) == report.text(VERDICT, 1.444)


@pytest.mark.parametrize(
    ("kind", "ranks", "why", "said"),
    [
        (
            "missing",
            (1,),
            "its `return` was taken",
            "rank 1 left the common path at a.py:3   f()   its `return` was taken",
        ),
        ("blocked", (1,), "it is blocked here; it has not left the common path", "rank 1 is blocked at a.py:3   f()"),
        ("cycle", (0, 1), "the same call on all ranks", "ranks 0, 1 wait for one another at a.py:3   f()"),
        ("mismatch", (1,), "the same call on all ranks", "rank 1 differs from the others at a.py:3   f()   the same"),
    ],
)
def test_what_a_rank_did_at_the_line(kind: Kind, ranks: tuple[int, ...], why: str, said: str) -> None:
    verdict = Verdict(kind, proven=True, ranks=ranks, left_at=LeftAt("a.py", 3, "main", "f()", why))
    assert report.text(verdict).splitlines()[1].startswith(f"  {said}")
