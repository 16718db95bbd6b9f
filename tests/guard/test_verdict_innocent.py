"""Ranks that are not out of step, faults that nobody waits for, and records that are not whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from instep.guard.records import Process
from instep.guard.verdict import judge, read_text, waits
from tests.guard.building import World, with_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from instep.guard.records import Snapshot, View
    from instep.guard.verdicts import Verdict


def views_of(folder: Path, source: str, nproc: int = 3) -> tuple[list[View], World]:
    world = World(folder, {"train.py": source}, nproc).run()
    views = world.views()
    world.close()
    return views, world


def told(views: list[View], read: Callable[[str], str | None] = read_text) -> Verdict:
    """The verdict, which is there."""
    verdict = judge(views, read)
    assert verdict is not None
    return verdict


def place(verdict: Verdict) -> tuple[str, int]:
    assert verdict.left_at is not None
    return verdict.left_at.file, verdict.left_at.line


def snapshot(view: View) -> Snapshot:
    assert view.snapshot is not None
    return view.snapshot


INNOCENT = {
    "a straggler at work": """
        for step in range(4):
            dist.backward()
            if dist.get_rank() == 1 and step == 2:
                spin(3)
        """,
    "late, asleep before the same collective": """
        dist.backward()
        if dist.get_rank() == 1:
            time.sleep(30)
        dist.barrier()
        """,
    "late in every step": """
        for step in range(4):
            dist.backward()
            if dist.get_rank() == 1 and step == 2:
                time.sleep(3)
        """,
    "the main rank works alone, second by second": """
        dist.backward()
        def preprocess():
            for part in range(60):
                time.sleep(1)
        if dist.get_rank() == 0:
            preprocess()
        dist.barrier()
        """,
    "the main rank works first": """
        if dist.get_rank() == 0:
            time.sleep(60)
            dist.barrier()
        else:
            dist.barrier()
        dist.backward()
        """,
    "rooted branches on unlike lines": """
        for step in range(3):
            if dist.get_rank() == 0:
                dist.broadcast(torch.ones(3))
            else:
                buffer = torch.ones(3)
                dist.broadcast(buffer)
        """,
    "branches of equal collectives on unlike lines": """
        for step in range(3):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3))
        """,
    "objects of unlike lengths": """
        for step in range(3):
            dist.all_gather_object([], "x" * (10 + dist.get_rank()))
        dist.barrier()
        """,
    "overlapped": """
        handles = [dist.all_reduce(torch.ones(n), async_op=True) for n in (10, 20, 30)]
        if dist.get_rank() == 1:
            spin(1)
        for handle in handles:
            handle.wait()
        """,
    "traffic of a subgroup": """
        group = dist.new_group([0, 1])
        for step in range(5):
            if dist.get_rank() < 2:
                dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()
        """,
    "a pipeline": """
        rank = dist.get_rank()
        for micro in range(3):
            if rank > 0:
                dist.recv(torch.ones(3), src=rank - 1)
            if rank < 2:
                dist.send(torch.ones(3), dst=rank + 1)
        if rank == 0:
            spin(1)
        dist.barrier()
        """,
    "a receiver of one that works": """
        rank = dist.get_rank()
        if rank == 0:
            spin(1)
            dist.send(torch.ones(3), dst=1)
        if rank == 1:
            dist.recv(torch.ones(3), src=0)
        dist.barrier()
        """,
    "all finished": """
        for step in range(3):
            dist.backward()
        dist.barrier()
        """,
    "uneven work without collectives": """
        for batch in range(3 + dist.get_rank()):
            x = batch
        dist.barrier()
        """,
    "one member of a group leaves early": """
        group = dist.new_group([0, 1])
        dist.barrier()
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(3), group=group)
            spin(1)
        """,
}


@pytest.mark.parametrize("name", INNOCENT)
def test_no_verdict(name: str, tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, INNOCENT[name])
    assert judge(views) is None


def test_a_note_says_who_works(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, INNOCENT["a straggler at work"])
    assert waits(views) == ["rank 1 works at train.py:5, ranks 0 and 2 wait for it since 3 s"]


BLOCKED = """
    rank = dist.get_rank()
    dist.barrier()
    if rank == 2:
        queue.Queue().get()
    dist.all_reduce(torch.ones(2))
    """


def test_workers_of_a_blocked_rank_work(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, BLOCKED)
    assert told(views).kind == "blocked"
    assert judge([with_process(view, busy=0.9) if view.rank == 2 else view for view in views]) is None


def test_a_rank_that_has_only_just_come_is_not_blocked(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, BLOCKED)
    beats = [replace(snapshot(view).beat, still_s=0.3) for view in views]
    young = [
        replace(view, beat=beat, snapshot=replace(snapshot(view), beat=beat))
        for view, beat in zip(views, beats, strict=True)
    ]
    assert judge(young) is None


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_rank_that_gives_no_sign(state: str, tmp_path: Path) -> None:
    """Stopped, or in a call that holds the interpreter; what it was seen at last is old."""
    views, _ = views_of(tmp_path, ENDED)
    halted = [
        replace(with_process(view, state=state), silent_s=4.0, age_s=4.0) if view.rank == 1 else view for view in views
    ]
    verdict = told(halted)
    assert (verdict.kind, verdict.proven, verdict.ranks) == ("blocked", False, (1,))


def test_equal_calls_in_another_order_are_a_silent_fault(tmp_path: Path) -> None:
    views, world = views_of(
        tmp_path,
        """
        def log(name):
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        if dist.get_rank() != 1:  # <- HERE
            log("loss")
            log("accuracy")
        else:
            first = 1
            log("accuracy")
            log("loss")
        spin(1)
        """,
    )
    verdict = judge(views)  # the two branches have no line in common: they may be meant so
    assert verdict is None
    assert world.marked()


def test_calls_off_by_one_are_a_silent_fault(tmp_path: Path) -> None:
    folder = tmp_path
    views, world = views_of(
        folder,
        """
        def a(): dist.all_reduce(torch.ones(1))
        def b(): dist.all_reduce(torch.ones(1))
        names = [b, a] if dist.get_rank() == 1 else [a, b]
        dist.barrier()
        for step in range(3):
            for one in names:
                one()  # <- HERE
        spin(1)
        """,
    )
    verdict = told(views)
    assert (verdict.kind, verdict.silent, verdict.proven, verdict.ranks) == ("mismatch", True, False, (1,))
    assert place(verdict) in world.marked()


DTYPES = """
    dist.broadcast(torch.ones(4, dtype="Long" if dist.get_rank() == 2 else "Float"))  # <- HERE
    for step in range(3):
        dist.all_reduce(torch.ones(1))
    spin(1)
    """


def test_a_dtype_that_nobody_notices(tmp_path: Path) -> None:
    views, world = views_of(tmp_path, DTYPES)
    verdict = told(views)
    assert (verdict.kind, verdict.silent, verdict.proven, verdict.ranks) == ("mismatch", True, True, (2,))
    assert place(verdict) in world.marked()


HEALTHY = """
    for step in range(3):
        dist.backward()
    spin(1)
    """


def _with_facts(views: list[View], facts: list[dict[str, str]]) -> list[View]:
    return [replace(view, snapshot=replace(snapshot(view), facts=one)) for view, one in zip(views, facts, strict=True)]


def test_facts(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, HEALTHY)
    assert judge(_with_facts(views, [{"seed": str(rank)} for rank in range(3)])) is None
    assert judge(_with_facts(views, [{"len(data)": "10"}, {}, {"len(data)": "10"}])) is None
    verdict = told(_with_facts(views, [{"len(data)": "10"}, {"len(data)": "9"}, {"len(data)": "10"}]))
    assert (verdict.kind, verdict.silent, verdict.proven, verdict.ranks) == ("mismatch", True, False, (1,))
    assert "len(data)" in verdict.reason
    assert verdict.values == {0: "len(data): 10", 1: "len(data): 9", 2: "len(data): 10"}


ENDED = """
    dist.barrier()
    rank = dist.get_rank()
    for step in range(5):
        if rank == 1 and step == 2:
            time.sleep(100)  # <- HERE
        dist.backward()
    """


def test_killed(tmp_path: Path) -> None:
    views, world = views_of(tmp_path, ENDED)
    killed = [replace(view, process=Process(False, "", 0.0, 137)) if view.rank == 1 else view for view in views]
    verdict = told(killed)
    assert (verdict.kind, verdict.proven, verdict.ranks) == ("dead", True, (1,))
    assert place(verdict) in world.marked()
    assert "signal 9" in verdict.reason


def test_killed_without_a_snapshot(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, ENDED)
    killed = [
        replace(view, process=Process(False, "", 0.0, 137), snapshot=None) if view.rank == 1 else view for view in views
    ]
    assert (told(killed).kind, told(killed).ranks) == ("dead", (1,))


def test_who_was_only_cut_off_is_not_to_blame(tmp_path: Path) -> None:
    views, _ = views_of(
        tmp_path,
        """
        def main():
            for step in range(4):
                dist.backward()
                if dist.get_rank() == 1 and step == 2:
                    return
                if dist.get_rank() == 0 and step == 2:
                    raise RuntimeError("[gloo] Connection reset by peer")
        main()
        """,
    )
    verdict = told(views)
    assert (verdict.kind, verdict.ranks) == ("missing", (1,))


def test_records_that_have_wrapped(tmp_path: Path) -> None:
    views, world = views_of(
        tmp_path,
        """
        rank = dist.get_rank()
        for step in range(20):
            dist.backward()
            if rank == 1 and step == 17:  # <- HERE
                dist.barrier()
        """,
    )
    cut = [replace(view, snapshot=replace(snapshot(view), ops=snapshot(view).ops[-4:])) for view in views]
    verdict = told(cut)
    assert (verdict.kind, verdict.ranks) == ("mismatch", (1,))
    assert place(verdict) in world.marked()


def test_a_rank_without_a_snapshot(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, BLOCKED)
    verdict = told([replace(view, snapshot=None) if view.rank == 2 else view for view in views])
    assert (verdict.kind, verdict.ranks) == ("blocked", (2,))
    verdict = told([replace(view, snapshot=None) if view.rank == 0 else view for view in views])
    assert (verdict.kind, verdict.ranks) == ("blocked", (2,))


def test_no_source(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, BLOCKED)
    assert told(views, read=lambda _: None).kind == "blocked"
    views, _ = views_of(
        tmp_path, "dist.barrier()\nif dist.get_rank() == 1:\n    dist.all_reduce(torch.ones(3))\ndist.barrier()"
    )
    verdict = told(views, read=lambda _: None)
    assert (verdict.kind, verdict.ranks) == ("mismatch", (1,))


def test_one_rank_alone_is_in_step(tmp_path: Path) -> None:
    views, _ = views_of(tmp_path, "dist.barrier()", 1)
    assert judge(views) is None


def test_each_names_another_root(tmp_path: Path) -> None:
    views, world = views_of(
        tmp_path,
        """
        rank = dist.get_rank()
        root = 2 if rank == 2 else 0
        dist.barrier()
        if rank == 9:
            dist.barrier()
        dist.broadcast(torch.ones(3), src=root)  # <- HERE
        """,
    )
    assert judge(views) is None  # the make-believe torch lets it pass
    assert world.marked()
