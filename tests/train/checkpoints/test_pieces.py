"""The pure parts, by tables; and the benchmark, which has to run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from instep.train.checkpoints import content, names, shares
from tests.commands import run_command


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-0", 0),
        ("step-12", 12),
        ("step-012", None),
        ("step-", None),
        ("step-1x", None),
        ("xstep-1", None),
        (".step-1", None),
    ],
)
def test_step_of_a_name(name: str, step: int | None) -> None:
    assert names.step_of(name) == step


def test_hidden_names_say_whose_they_are() -> None:
    mine = names.read_aside(names.aside(12, "partial"))
    assert mine is not None
    assert (mine.step, mine.why, mine.pid, mine.here, mine.alive) == (12, "partial", os.getpid(), True, True)
    assert names.aside(12, "partial") != mine.name
    other = names.read_aside(".step-3.removed-host-with-dashes-7-1-2-3")
    assert other is not None
    assert (other.machine, other.here, other.alive) == (("host-with-dashes", 7), False, False)
    assert names.read_aside(".step-3.removed-host") is None
    assert names.read_aside("step-3") is None


@pytest.mark.parametrize(
    ("of_ranks", "loads"),
    [
        ([{"a": 5, "b": 3, "c": 2}], [10]),
        ([{"a": 5, "b": 3, "c": 2}] * 2, [5, 5]),
        ([{"a": 1}] * 3, [1, 0, 0]),
        ([{"a": 4}, {"a": 4, "only here": 9}], [4, 9]),
        ([{}, {}], [0, 0]),
    ],
)
def test_each_tensor_is_written_once(of_ranks: list[dict[str, int]], loads: list[int]) -> None:
    found = shares.divide(of_ranks)
    assert [sum(of_ranks[rank][key] for key in keys) for rank, keys in enumerate(found)] == loads
    assert sorted(key for keys in found for key in keys) == sorted({key for sizes in of_ranks for key in sizes})


def test_taken_apart_and_put_together() -> None:
    state = {"a": [1, (torch.ones(2), {"b": None})], "c": {}, 3: torch.zeros(1), "d": [], "e": torch.Size([1])}
    parts = content.Parts(state, "x.")
    assert sorted(parts.tensors) == ["x.3", "x.a.1.0"]
    assert sorted(content.places(parts.plain, "x.")) == ["x.3", "x.a.1.0"]
    again = content.put_together(parts.plain, parts.tensors, "x.")
    assert str(again) == str(state)
    assert parts.problems == []


def test_benchmark_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "checkpoint.py"
    words: list[str | Path] = [sys.executable, script, "--ranks", "2", "--size", "3", "--repeat", "1", "--json"]
    found = json.loads(run_command(words, cwd=tmp_path).ok().out)
    assert found["stall_ratio"] > 0
    assert found["ranks"] == 2
    assert list(tmp_path.iterdir()) == []
