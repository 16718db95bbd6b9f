"""What is said beside the line: values, why, rivals; and programs that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instep.guard.locate import Locator
from instep.guard.records import Frame
from instep.guard.sources import Sources
from instep.guard.verdict import judge
from tests.guard.building import World

if TYPE_CHECKING:
    from pathlib import Path

    from instep.guard.verdicts import Verdict

FILE = "/home/user/train.py"
LIBRARY = Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 10, "all_reduce", False)


def at(line: int, function: str = "main", *outer: Frame) -> tuple[Frame, ...]:
    return (LIBRARY, Frame(FILE, line, function, True), *outer)


def verdict_of(folder: Path, source: str, nproc: int = 3) -> Verdict:
    world = World(folder, {"train.py": source}, nproc).run()
    try:
        verdict = judge(world.views())
    finally:
        world.close()
    assert verdict is not None
    assert verdict.left_at is not None
    return verdict


def test_values_of_a_condition_that_still_holds(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        """
        def main(rank):
            size = 5 if rank == 1 else 50
            dist.barrier()
            if size < 10:
                dist.all_reduce(torch.ones(3))
            dist.barrier()
        main(dist.get_rank())
        """,
    )
    assert verdict.values == {0: "size < 10: False", 1: "size < 10: True", 2: "size < 10: False"}
    assert verdict.left_at is not None
    assert verdict.left_at.why == "this branch was taken"
    assert verdict.left_at.source == "if size < 10:"
    assert verdict.left_at.function == "main"


def test_a_condition_that_has_changed_since_is_told_by_the_way_taken(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        """
        rank = dist.get_rank()
        for step in range(6):
            loss = torch.scalar(float("nan") if rank == 1 and step == 3 else 0.5)
            if not torch.isfinite(loss):
                continue
            dist.backward()
        dist.barrier()
        """,
    )
    text = "not torch.isfinite(loss)"
    assert verdict.values == {0: f"{text}: False", 1: f"{text}: True", 2: f"{text}: False"}
    assert verdict.left_at is not None
    assert verdict.left_at.why == "its `continue` was taken"


def test_trips_of_a_loop(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        """
        for step in range(3 if dist.get_rank() == 2 else 5):
            dist.backward()
        dist.barrier()
        """,
    )
    assert verdict.values == {0: "step = 3", 1: "step = 3", 2: "step = 2"}
    assert verdict.left_at is not None
    assert verdict.left_at.why == "this loop ended earlier"


def test_unlike_sizes_name_the_variable(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        """
        rows = torch.ones(20 if dist.get_rank() == 1 else 10)
        dist.barrier()
        dist.all_reduce(rows)
        """,
    )
    assert verdict.values == {0: "rows = float32 [10]", 1: "rows = float32 [20]", 2: "rows = float32 [10]"}


def test_two_lines_that_are_as_likely_are_both_named(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        """
        import random
        numbers = [random.Random(dist.get_rank() + 40) for _ in range(2)]
        def one(): return dist.get_rank() != 1
        def other(): return True
        def work():
            if not other():
                return
            if not one():
                return
            dist.backward()
        for step in range(3):
            work()
            dist.broadcast(torch.ones(3))
        """,
    )
    assert verdict.left_at is not None
    assert "the likeliest of several" in verdict.left_at.why
    assert any("as likely" in line for line in verdict.evidence)


SOURCE = """
def main(rank, data):
    for step in range(10):
        if rank == 0:
            evaluate(data)
        dist.all_reduce(data)


def evaluate(data):
    dist.all_reduce(data)
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SOURCE, 4),
        (None, 5),  # without the source all that is known is where they are
        ("def main(:\n", 5),
        ("x = 1\n", 5),
    ],
)
def test_where_two_stacks_part(text: str | None, line: int) -> None:
    outer = Frame(FILE, 5, "main", True)
    parting = Locator(lambda _: text, {}).part(at(6), at(6), (*at(10, "evaluate"), outer), (), ())
    assert parting is not None
    found = parting.left_at
    assert found.line == line
    if text == SOURCE:
        assert (found.function, found.source) == ("main", "if rank == 0:")
    else:
        assert "no branch between them was found" in found.why
    assert parting.values == {}


def test_nothing_in_common() -> None:
    other = Frame("/home/user/other.py", 3, "work", True)
    locator = Locator(lambda _: SOURCE, {})
    assert locator.part(None, at(6), (LIBRARY, other), (), ()) is None
    assert locator.part(None, (), (), (), ()) is None


def test_functions_of_one_name_are_told_apart_by_their_lines() -> None:
    text = (
        "class A:\n    def run(self):\n        a()\n\nclass B:\n    def run(self):\n        b()\n\nf = lambda x: c(x)\n"
    )
    sources = Sources(lambda _: text)
    assert [getattr(sources.scope(FILE, "run", line), "lineno", None) for line in (3, 7)] == [2, 6]
    assert getattr(sources.scope(FILE, "<lambda>", 9), "lineno", None) == 9
    assert sources.scope(FILE, "walk", 3) is None


def test_a_file_that_cannot_be_read() -> None:
    def read(_: str) -> str:
        raise OSError

    sources = Sources(read)
    assert (sources.line(FILE, 3), sources.tree(FILE), sources.statement(FILE, 3)) == ("", None, None)
