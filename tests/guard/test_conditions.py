"""What conditions were, from texts of variables."""

from __future__ import annotations

import ast

import pytest

from instep.guard.conditions import UNKNOWN, asks_for_rank, evaluate, singled_out, truth, value_of

VALUES = {
    "loss": "nan (float32)",
    "step": "12",
    "batch": "float32 [0, 16]",
    "items": "list of 7",
    "empty": "[]",
    "name": "'eval'",
    "self.best": "0.25",
    "flags": "dict of 2: 'a', 'b'",
    "model": "Linear",
    "config['train']": "True",
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("not torch.isfinite(loss)", True),
        ("torch.isnan(loss).any()", True),
        ("math.isfinite(loss.item())", False),
        ("step % 5 == 2 and name != 'train'", True),
        ("len(items) > 6", True),
        ("not items", False),
        ("not empty", True),
        ("len(batch) == 0", True),
        ("batch.shape[0] == 0 or undefined", True),
        ("batch.size(1) == 16", True),
        ("batch.numel() > 0", False),
        ("self.best < 0.5", True),
        ("config['train']", True),
        ("dist.get_rank() == 2", True),
        ("rank != 0 and self.rank == 2", True),
        ("accelerator.is_main_process", False),
        ("dist.get_rank(group) == 2", None),
        ("step == dist.get_world_size() * 3", True),
        ("1 <= step < 20", True),
        ("name in ('eval', 'test')", True),
        ("step if loss else 0", True),
        ("model.training", None),
        ("unknown > 3", None),
        ("unknown and False", False),
        ("step / 0", None),
        ("open('x')", None),
    ],
)
def test_truth(text: str, value: bool | None) -> None:
    assert truth(ast.parse(text, mode="eval").body, VALUES, rank=2, size=4) is value


def test_values() -> None:
    assert value_of("3 (int64[1])") == 3
    assert value_of("True (bool)") is True
    assert value_of("Linear") is UNKNOWN
    assert evaluate(ast.parse("1 - rank", mode="eval").body, {}, 1) == 0


@pytest.mark.parametrize(
    ("text", "results", "picked"),
    [
        ("rank == 0", {0: True, 1: False}, [0]),
        ("rank != 0", {0: False, 1: True}, [0]),
        ("rank == 1", {0: False, 1: True}, [1]),
        ("is_main", {0: True, 1: False}, [0]),
        ("not is_main", {0: False, 1: True}, [0]),
        ("rank % 2", {0: False, 1: True, 2: False}, [1]),
        ("rank == 0", {0: True, 1: True}, []),
    ],
)
def test_the_rank_that_a_condition_singles_out(text: str, results: dict[int, bool | None], picked: list[int]) -> None:
    expression = ast.parse(text, mode="eval").body
    assert asks_for_rank(expression)
    assert singled_out(expression, results) == picked
