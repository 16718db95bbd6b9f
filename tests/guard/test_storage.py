"""Files between a rank and the watch: half beats, other sizes, what is not there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from instep.guard import storage
from instep.guard.records import Beat, Frame, Group, Op, Raised, Snapshot

if TYPE_CHECKING:
    from pathlib import Path

STACK = [("/a/train.py", 41, "main", True, 12), ("/lib/torch/x.py", 3, "f.<locals>.g", False, -1)]
GROUPS = [("0", (0, 1, 2), 117), ("7", (0, 2), 3)]


def beat_of(folder: Path, rank: int) -> Any:
    """A rank's last beat, or None."""
    return storage.read_beat(folder, rank)


def snapshot_of(folder: Path, rank: int) -> Any:
    """A rank's last snapshot, or None."""
    return storage.read_snapshot(folder, rank)


def a_beat(**changes: Any) -> Any:
    frames = tuple(Frame(file, line, name, user, {}, lasti) for file, line, name, user, lasti in STACK)
    beat = Beat(1, 0, 4, 12.5, tuple(Group(*one) for one in GROUPS), frames, 0.25)
    return replace(beat, **changes)


def test_the_last_beat_comes_back(tmp_path: Path) -> None:
    assert beat_of(tmp_path, 1) is None
    writer = storage.BeatWriter(tmp_path, 1)
    assert beat_of(tmp_path, 1) is None
    for number in range(1, 4):
        writer.write(12.5, GROUPS, STACK, 0.25, None)
        found = beat_of(tmp_path, 1)
        assert found == a_beat(count=number, pid=found.pid)
    writer.close()
    assert beat_of(tmp_path, 1).count == 3


def _number(data: bytes) -> int:
    found = storage._last_whole(data)
    assert found is not None
    return int(found[2])


def test_half_a_beat_is_never_seen(tmp_path: Path) -> None:
    writer = storage.BeatWriter(tmp_path, 0)
    writer.write(1.0, GROUPS, STACK, 0.0, None)
    writer.write(2.0, GROUPS, STACK, 0.0, None)
    path = storage.beat_path(tmp_path, 0)
    whole = path.read_bytes()
    assert _number(whole) == 2
    place = storage._FILE.size  # an even number's
    for at in range(place, place + 200):
        torn = bytearray(whole)
        torn[at] ^= 0xFF
        assert _number(bytes(torn)) in {1, 2}
    torn = bytearray(whole)
    torn[place + storage._PLACE.size + 5] ^= 0xFF
    path.write_bytes(torn)
    assert beat_of(tmp_path, 0).count == 1


@pytest.mark.parametrize("content", [b"", b"instep-1", b"x" * 100, b"instep-1" + bytes(100)])
def test_another_file_holds_no_beat(tmp_path: Path, content: bytes) -> None:
    storage.beat_path(tmp_path, 0).write_bytes(content)
    assert beat_of(tmp_path, 0) is None


def test_reading_while_writing(tmp_path: Path) -> None:
    writer = storage.BeatWriter(tmp_path, 0)
    writer.write(0.0, GROUPS, STACK, 0.0, None)
    end = threading.Event()

    def write() -> Any:
        number = 1
        while not end.is_set():
            number += 1
            # Each beat of its own length, all of one number.
            writer.write(float(number), [(str(number), (number,) * (number % 50), number)], STACK, 0.0, None)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        for _ in range(1500):
            beat = beat_of(tmp_path, 0)
            if beat is not None and beat.count > 1:
                assert beat.count >= last
                last = beat.count
                number = int(beat.time_s)
                assert beat.groups == (Group(str(number), (number,) * (number % 50), number),)
    finally:
        end.set()
        thread.join()


def test_a_beat_that_is_too_large_gets_a_larger_file(tmp_path: Path) -> None:
    writer = storage.BeatWriter(tmp_path, 0)
    writer.write(1.0, GROUPS, STACK, 0.0, None)
    small = storage.beat_path(tmp_path, 0).stat().st_size
    many = [(str(number), tuple(range(4000)), 1) for number in range(10)]
    writer.write(2.0, many, STACK, 0.0, None)
    assert len(beat_of(tmp_path, 0).groups[9].members) == 4000
    assert storage.beat_path(tmp_path, 0).stat().st_size > small
    writer.write(3.0, GROUPS, STACK, 0.0, "finished")
    assert beat_of(tmp_path, 0).ended == "finished"


def test_a_question_is_seen_by_who_came_before_and_after_it(tmp_path: Path) -> None:
    before = storage.Asked(tmp_path)
    assert before.count() == 0
    assert storage.ask(tmp_path) == 1
    assert storage.ask(tmp_path) == 2
    after = storage.Asked(tmp_path)
    assert (before.count(), after.count()) == (2, 2)
    storage.ask(tmp_path)
    assert (before.count(), after.count()) == (3, 3)


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    beat = a_beat(ended=None)
    op = Op("0", 117, "all_reduce", ((4, 4), ()), ("Float", "Long"), False, beat.stack, 99, 2)
    raised = Raised("my.Error", "wörds\n", beat.stack)
    valued = (replace(beat.stack[0], values={"loss": "nan", "k": '"'}), beat.stack[1])
    snapshot = Snapshot(beat, (op, replace(op, index=118)), valued, (raised,), raised, {"seed": "3"})
    assert snapshot_of(tmp_path, 1) is None
    storage.write_snapshot(tmp_path, snapshot)
    assert snapshot_of(tmp_path, 1) == snapshot
    assert [one.name for one in tmp_path.iterdir()] == ["rank-1.snapshot"]


def test_who_has_left_is_known_to_have_asked_for_all_its_operations(tmp_path: Path) -> None:
    beat = a_beat(ended="finished")
    op = Op("0", 120, "barrier", (), (), True, beat.stack)
    storage.write_snapshot(tmp_path, Snapshot(beat, (op,), beat.stack))
    assert [one.asked for one in snapshot_of(tmp_path, 1).beat.groups] == [120, 3]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"beat": []}'])
def test_another_file_is_no_snapshot(tmp_path: Path, text: str) -> None:
    storage.snapshot_path(tmp_path, 0).write_text(text)
    assert snapshot_of(tmp_path, 0) is None


def test_a_dump_that_wants_code_to_run_is_none(tmp_path: Path) -> None:
    import pickle

    from instep.guard.positions import Places

    snapshot = Snapshot(a_beat(), (), ())
    storage.write_snapshot(tmp_path, snapshot, pickle.dumps(time.sleep), Places())
    assert snapshot_of(tmp_path, 1) is None


def test_the_main_threads_stack_among_others() -> None:
    text = """\
Fatal Python error: Aborted

Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 10 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/lib/c10d.py", line 5 in all_reduce
  File "/home/me/my train.py", line 41 in <module>

Extension modules: numpy (total: 1)
"""
    wanted = (("/lib/c10d.py", 5, "all_reduce"), ("/home/me/my train.py", 41, "<module>"))
    assert storage.stack_in_text(text) == wanted
    assert storage.stack_in_text(text, "0x7f0000000002") == wanted
    assert storage.stack_in_text(text, "0x7f0000000001") == (("/lib/threading.py", 10, "wait"),)
    assert storage.stack_in_text("Segmentation fault") == ()
