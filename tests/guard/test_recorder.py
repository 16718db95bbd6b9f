"""The recorder in real ranks: what it tells of them while they wait, when they are stopped, killed, or end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from instep.guard import storage
from tests.harness import RankDiedError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[[str], subprocess.Popen[bytes]]

LIMIT_S = 20.0


def until(look: Any, limit_s: float = LIMIT_S) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def beat_of(folder: Path, rank: int) -> Any:
    """A rank's last beat, or None."""
    return storage.read_beat(folder, rank)


def snapshot_of(folder: Path, rank: int) -> Any:
    """A rank's last snapshot, or None."""
    return storage.read_snapshot(folder, rank)


def functions(frames: Any) -> Any:
    return [one.function.rpartition(".")[2] for one in frames]


def of_user(frames: Any) -> Any:
    """The source lines of the user's frames in this file, innermost first."""
    lines = Path(__file__).read_text().splitlines()
    return [lines[one.line - 1].strip() for one in frames if one.user and one.file == __file__]


def in_rank(folder: Path) -> Any:
    """Start the recorder in this rank."""
    from instep.guard import recorder

    return recorder.start(Path(folder), int(os.environ["RANK"]))


def standing(folder: Path, rank: int, name: str) -> Any:
    """The snapshot of a rank that stands in the function of this name."""

    def look() -> Any:
        found = snapshot_of(folder, rank)
        return found if found and name in functions(found.stack) and found.beat.still_s > 0.3 else None

    return until(look)


def test_a_rank_that_waits_tells_where_and_for_what(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        in_rank(folder)
        pair = dist.new_group([0, 2])
        single = dist.new_group([1])
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(2), group=single)
            seen = [standing(folder, rank, "broadcast") for rank in (0, 2)]
            first = [beat_of(folder, rank).count for rank in (0, 2)]
            until(lambda: beat_of(folder, 0).count > first[0] and beat_of(folder, 2).count > first[1])
            beats = [beat_of(folder, rank) for rank in (0, 1, 2)]
            dist.broadcast(torch.ones(4, 4, dtype=torch.float64), src=1)
            dist.barrier()
            return seen, beats
        count = 41
        dist.all_gather_object([None, None], {"count": count}, group=pair)
        dist.broadcast(torch.ones(4, 4, dtype=torch.float64), src=1)
        dist.barrier()
        return None

    seen, beats = run_ranks(work, 3, tmp_path, join="torch")[1]
    assert [[(one.name, one.members) for one in beat.groups] for beat in beats] == [
        [("0", (0, 1, 2)), ("1", (0, 2))],
        [("0", (0, 1, 2)), ("2", (1,))],
        [("0", (0, 1, 2)), ("1", (0, 2))],
    ]
    for snapshot, beat in zip(seen, beats[::2], strict=True):
        assert "broadcast" in functions(beat.stack)
        assert beat.ended is None
        assert snapshot.handled == ()
        last = snapshot.ops[-1]
        assert (last.group, last.kind, last.sizes, last.dtypes) == ("0", "broadcast", ((4, 4),), ("Double",))
        assert (last.done, last.root) == (False, 1)
        asked = {one.name: one.asked for one in snapshot.beat.groups}
        assert (last.group, last.index) == ("0", asked["0"])
        wanted = "dist.broadcast(torch.ones(4, 4, dtype=torch.float64), src=1)"
        assert of_user(last.frames)[0] == of_user(snapshot.stack)[0] == of_user(beat.stack)[0] == wanted
        site = next(one for one in snapshot.stack if one.user)
        assert site.values["count"] == "41"
        inner = next(one for one in snapshot.stack if one.function.endswith("broadcast"))
        assert (inner.values["src"], inner.values["group"]) == ("1", "0")
        gathers = [op for op in snapshot.ops if op.group == "1"]
        assert gathers
        assert {of_user(op.frames)[0] for op in gathers} == {
            'dist.all_gather_object([None, None], {"count": count}, group=pair)'
        }
        assert all(op.done for op in snapshot.ops[:-1])
        assert next(op.kind for op in snapshot.ops if op.group == "0") == "all_reduce"


def test_buckets_of_ddp_lead_to_the_users_backward(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        in_rank(folder)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

        def step() -> Any:
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()

        for _ in range(5):
            step()
        if dist.get_rank() == 0:
            step()
        else:
            seen = standing(folder, 0, "backward")
            step()
            return seen
        return None

    snapshot = run_ranks(work, 2, tmp_path, join="torch")[1]
    last = snapshot.ops[-1]
    assert (last.kind, last.sizes, last.dtypes, last.done) == ("all_reduce", ((20,),), ("Float",), False)
    assert of_user(last.frames)[:2] == ["loss.backward()", "step()"]
    buckets = [op for op in snapshot.ops if op.kind == "all_reduce" and op.sizes == ((20,),)]
    assert all(op.frames == buckets[0].frames for op in buckets[:5])
    assert snapshot.facts["learning rate of SGD #1 after step 4"] == "0.25"
    assert snapshot.facts["steps of SGD #1"] == "5"
    assert snapshot.facts["world size"] == "2"
    site = next(one for one in snapshot.stack if one.user)
    assert site.values["loss"].endswith("(float32)")


def test_sends_and_receives_are_seen_by_their_arguments(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        in_rank(folder)
        if dist.get_rank() == 0:
            dist.recv(torch.ones(5), src=1, tag=7)
            return None
        seen = standing(folder, 0, "recv")
        dist.send(torch.ones(5), dst=0, tag=7)
        return seen

    snapshot = run_ranks(work, 2, tmp_path, join="torch")[1]
    recv = next(one for one in snapshot.stack if one.function.endswith("recv"))
    assert (recv.values["src"], recv.values["group"], recv.values["tag"]) == ("1", "0", "7")


def test_samplers_and_loaders_are_told_of(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        recorder = in_rank(folder)
        data = TensorDataset(torch.ones(10, 2))
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=dist.get_rank()))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())

        def train() -> Any:
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()

        train()
        recorder.leave("finished")

    run_ranks(work, 2, tmp_path, join="torch")
    facts = [snapshot_of(tmp_path, rank).facts for rank in (0, 1)]
    assert [one["random seed of loader.sampler"] for one in facts] == ["0", "1"]
    for one in facts:
        assert one["samples of loader.sampler"] == "5"
        assert one["size of loader.dataset"] == "tensors: 10"
        assert one["batch size of loader"] == "2"
        assert one["steps of AdamW #1"] == "3"
        assert "torch" in one
        assert "seed" in one


def test_a_swallowed_exception_is_seen_while_it_is_handled(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        in_rank(folder)
        if dist.get_rank() == 0:
            limit = 3
            try:
                raise ValueError(f"above {limit}")
            except ValueError:
                dist.all_reduce(torch.ones(1))
            return None
        seen = standing(folder, 0, "all_reduce")
        dist.all_reduce(torch.ones(1))
        return seen

    (handled,) = run_ranks(work, 2, tmp_path, join="torch")[1].handled
    assert (handled.kind, handled.text) == ("ValueError", "above 3")
    assert of_user(handled.frames) == ['raise ValueError(f"above {limit}")']
    assert handled.frames[0].values["limit"] == "3"


def test_a_question_is_answered_by_a_busy_rank(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        in_rank(folder)
        unasked = busy(folder, 0.5)  # two looks of the recorder's
        asked_s = time.monotonic()
        storage.ask(folder)
        return unasked, asked_s, busy(folder, LIMIT_S)

    def busy(folder: Path, limit_s: float) -> Any:
        """Work until there is a snapshot."""
        end = time.monotonic() + limit_s
        while not (found := snapshot_of(folder, 0)) and time.monotonic() < end:
            sum(range(100_000))
        return found

    ((unasked, asked_s, answer),) = run_ranks(work, 1, tmp_path, join=None)
    assert unasked is None
    assert answer.beat.time_s > asked_s
    assert "busy" in functions(answer.stack)


def test_who_leaves_tells_how(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        recorder = in_rank(folder)
        dist.init_process_group("gloo")
        dist.barrier()
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        rank = dist.get_rank()
        until(lambda: beat_of(folder, rank).groups)
        dist.destroy_process_group()
        try:
            fail(rank)
        except (ValueError, SystemExit) as error:
            recorder.leave("failed", error)

    def fail(number: int) -> Any:
        if number == 0:
            raise ValueError("no such thing")
        raise SystemExit(0)

    run_ranks(work, 2, tmp_path, join=None)
    failed, finished = (snapshot_of(tmp_path, rank) for rank in (0, 1))
    assert (failed.beat.ended, finished.beat.ended) == ("failed", "finished")
    assert [beat_of(tmp_path, rank).ended for rank in (0, 1)] == ["failed", "finished"]
    assert finished.last_raised is None
    assert (failed.last_raised.kind, failed.last_raised.text) == ("ValueError", "no such thing")
    assert of_user(failed.last_raised.frames) == ['raise ValueError("no such thing")', "fail(rank)"]
    assert failed.last_raised.frames[0].values["number"] == "0"
    for snapshot in (failed, finished):
        ops = [op for op in snapshot.ops if op.kind == "all_reduce"]
        assert len(ops) == 3
        assert [(one.name, one.asked) for one in snapshot.beat.groups] == [("0", ops[-1].index)]


def test_gloos_abort_leaves_the_line(tmp_path: Path) -> None:
    def work(folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        in_rank(folder)
        dist.all_reduce(torch.ones(2))
        size = 100 if dist.get_rank() == 0 else 20_000
        signal.setitimer(signal.ITIMER_REAL, 2.0)  # the abort itself is held for six seconds
        dist.all_reduce(torch.ones(size))

    with pytest.raises((RankDiedError, RuntimeError)):
        run_ranks(work, 2, tmp_path, join="torch")
    stacks = [storage.main_stack(storage.fatal_path(tmp_path, rank)) for rank in (0, 1)]
    aborted = next(stack for stack in stacks if stack)
    line = next(number for file, number, _ in aborted if file == __file__)
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "dist.all_reduce(torch.ones(size))"


# --- Without torch: a rank is any Python program. ---

HEAD = """
import os, sys, time
from pathlib import Path
from instep.guard import recorder, storage
folder = Path(sys.argv[1])
rec = recorder.start(folder, 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Start a program whose recorder runs."""
    running = []

    def start(body: str, name: str = "prog.py") -> Any:
        script = tmp_path / name
        script.write_text(HEAD + body)
        process = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        running.append(process)
        until((tmp_path / "ready").exists)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


READY = "(folder / 'ready').touch()\n"


def line_of(tmp_path: Path, text: str) -> Any:
    lines = (tmp_path / "prog.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_beats_come_before_torch_is_there(tmp_path: Path, program: Start) -> None:
    program("def wait():\n    time.sleep(60)\n" + READY + "wait()")
    beat = until(lambda: (b := beat_of(tmp_path, 0)) and b.still_s > 0.3 and b)
    assert (beat.groups, beat.ended) == ((), None)
    assert [(one.function, one.line) for one in beat.stack] == [
        ("wait", line_of(tmp_path, "sleep(60)")),
        ("<module>", line_of(tmp_path, "wait()") + 3),
    ]
    assert all(one.user and one.file == str(tmp_path / "prog.py") for one in beat.stack)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_last_beat_of_a_stopped_or_killed_rank_can_be_read(tmp_path: Path, program: Start, number: int) -> None:
    process = program(READY + "def work():\n    time.sleep(60)\nwork()")
    until(lambda: beat_of(tmp_path, 0).still_s > 0.3)
    process.send_signal(number)
    time.sleep(0.3)
    first = beat_of(tmp_path, 0)
    time.sleep(0.5)
    assert beat_of(tmp_path, 0) == first
    assert first.stack[0].function == "work"
    assert first.pid == process.pid


def test_a_rank_that_holds_the_interpreters_lock_falls_silent_but_shows_its_stack(
    tmp_path: Path, program: Start
) -> None:
    hold = "import ctypes\ndef hold():\n    ctypes.PyDLL(None).sleep(60)\n" + READY + "hold()"
    process = program(hold)
    until(lambda: _is_silent(tmp_path))
    assert storage.read_stacks(tmp_path, 0) == ""
    storage.clear_stacks(tmp_path, 0)
    process.send_signal(storage.STACKS_SIGNAL)
    until(lambda: "<module>" in storage.read_stacks(tmp_path, 0))
    stack = storage.main_stack(storage.stacks_path(tmp_path, 0))
    assert stack[0] == (str(tmp_path / "prog.py"), line_of(tmp_path, "sleep(60)"), "hold")


def _is_silent(folder: Path) -> Any:
    beat = beat_of(folder, 0)
    return beat is not None and time.monotonic() - beat.time_s > 1.0


def test_a_crash_leaves_its_stack(tmp_path: Path, program: Start) -> None:
    program(READY + "def crash():\n    os.abort()\ncrash()")
    # At once; its end is held for some seconds, see test_aborts.py.
    stack = until(lambda: storage.main_stack(storage.fatal_path(tmp_path, 0)))
    assert [name for _, _, name in stack] == ["crash", "<module>"]
    assert "Aborted" in storage.read_fatal(tmp_path, 0)


def test_signals_are_the_programs(tmp_path: Path, program: Start) -> None:
    """A program that blocks a signal can fetch it later: the kernel gives it to no thread of the recorder's instead."""
    block = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n" + READY
    wait = "while not (folder / 'sent').exists():\n    time.sleep(0.02)\n"
    process = program(block + wait + "print(signal.sigtimedwait([signal.SIGUSR1], 20).si_signo)\n")
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "sent").touch()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output.decode().split()) == (0, [str(int(signal.SIGUSR1))])


def test_a_forked_child_is_not_the_rank(tmp_path: Path, program: Start) -> None:
    body = """
import faulthandler, threading
before = storage.read_beat(folder, 0).count
child = os.fork()
if child == 0:
    assert not any(one.name == "instep-recorder" for one in threading.enumerate())
    rec.leave("finished")
    rec.stop()
    faulthandler.dump_traceback()
    os.abort()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -6
assert storage.read_snapshot(folder, 0) is None
assert storage.read_fatal(folder, 0) == ""
while storage.read_beat(folder, 0).count < before + 3:
    time.sleep(0.05)
assert storage.read_beat(folder, 0).pid == os.getpid()
print("went well")
"""
    output, _ = program(READY + body).communicate(timeout=60)
    assert output.decode().rstrip().endswith("went well")
    assert "Fatal Python error: Aborted" in output.decode()  # the child's crash goes where it went without a recorder


def test_a_spawned_child_has_no_recorder(tmp_path: Path) -> None:
    script = tmp_path / "prog.py"
    script.write_text("""
import multiprocessing, sys, threading
from pathlib import Path
def child():
    sys.exit(any(one.name == "instep-recorder" for one in threading.enumerate()))
if __name__ == "__main__":
    from instep.guard import recorder
    recorder.start(Path(sys.argv[1]), 0)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""")
    assert subprocess.run([sys.executable, script, tmp_path], timeout=60, check=False).returncode == 0


def test_the_program_ends_as_without_a_recorder(tmp_path: Path, program: Start) -> None:
    process = program(READY + "import atexit\natexit.register(print, 'last word')\nsys.exit(7)")
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (7, b"last word\n")


def test_code_of_the_users_is_not_run_by_a_snapshot(tmp_path: Path, program: Start) -> None:
    body = """
class Angry:
    def __repr__(self):
        (folder / "ran").touch()
        time.sleep(60)
    __str__ = __len__ = __bool__ = __eq__ = __hash__ = __getattribute__ = __repr__
def work():
    angry, plain = Angry(), 5
    try:
        raise ValueError(angry)
    except ValueError:
        rec.snapshot()
        time.sleep(60)
"""
    program(READY + body + "work()")
    snapshot = until(lambda: snapshot_of(tmp_path, 0))
    frame = next(one for one in snapshot.stack if one.function == "work")
    assert (frame.values["angry"], frame.values["plain"]) == ("Angry", "5")
    assert snapshot.handled[0].text == "Angry"
    assert not (tmp_path / "ran").exists()


def test_a_deep_stack_keeps_the_users_frames(tmp_path: Path, program: Start) -> None:
    body = """
import json
class Deep(json.JSONEncoder):
    def default(self, value):
        time.sleep(60)
def outermost():
    value = object()
    for _ in range(60):
        value = [value]
    list(Deep(indent=1).iterencode(value))  # written in Python: a frame for each
"""
    program(READY + body + "outermost()")
    beat = until(lambda: (b := beat_of(tmp_path, 0)) and b.still_s > 0.3 and b)
    assert len(beat.stack) <= 40
    assert [one.function.rpartition(".")[2] for one in beat.stack if one.user] == ["default", "outermost", "<module>"]


def test_a_pause_is_a_pause(tmp_path: Path) -> None:
    from instep.guard import recorder

    rec = recorder.start(tmp_path, 0, every_s=0.01)
    try:
        until(lambda: beat_of(tmp_path, 0).count > 3)
        rec.pause()
        time.sleep(0.1)
        count = beat_of(tmp_path, 0).count
        time.sleep(0.1)
        assert beat_of(tmp_path, 0).count == count
        rec.resume()
        until(lambda: beat_of(tmp_path, 0).count > count)
    finally:
        rec.stop()
