"""The harness itself: what each test relies on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import instep
from tests import commands, harness
from tests.harness import HungError, LeakedError, RankDiedError, run_command, run_job

run_ranks = partial(harness.run_ranks, join="torch")  # these tests are about the harness, not about joining

NAP = [sys.executable, "-c", "import time; time.sleep(60)"]


class OddError(Exception):
    """An exception whose constructor pickle cannot call."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class PlainError(Exception):
    """An exception of a test module."""


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_values_come_back_in_rank_order() -> None:
    offset = 10

    def work(step: int, *, scale: int) -> tuple[int, torch.Tensor]:
        time.sleep(0.1 * (2 - dist.get_rank()))  # rank 0 is the last to end
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return offset + step + scale * dist.get_rank(), total

    assert [value for value, _ in run_ranks(work, 3, 5, scale=100)] == [15, 115, 215]
    assert [float(total) for _, total in run_ranks(work, 3, 5, scale=100)] == [3.0, 3.0, 3.0]


def test_ranks_join_with_instep_unless_told_otherwise() -> None:
    def work() -> tuple[int, int, bool]:
        return instep.rank(), instep.total(instep.rank() + 1), dist.is_initialized()

    assert harness.run_ranks(work, 3) == [(0, 6, True), (1, 6, True), (2, 6, True)]
    assert harness.run_ranks(dist.is_initialized, 2, join=None) == [False, False]


def test_it_is_quick() -> None:
    started = time.monotonic()
    run_ranks(dist.get_rank, 2)
    assert time.monotonic() - started < 2


def test_each_rank_has_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.chdir(tmp_path)
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "SLURM_PROCID", "SEEN", "X", "HOME"]

    def work() -> tuple[list[str | None], int, str]:
        return [os.environ.get(name) for name in names], torch.get_num_threads(), str(Path.cwd())

    got = harness.run_ranks(work, 3, nodes=[2, 1], env={"X": "1", "HOME": None}, join=None)
    same = ["3", None, "yes", "1", None]
    assert [one for one, _, _ in got] == [
        ["0", "0", "2", "0", *same],
        ["1", "1", "2", "0", *same],
        ["2", "0", "1", "1", *same],
    ]
    assert [rest for _, *rest in got] == [[1, str(tmp_path)]] * 3


def test_ranks_do_not_share_their_random_numbers() -> None:
    import random

    assert len(set(run_ranks(lambda: random.random(), 3, join=None))) == 3  # noqa: PLW0108 (its state would travel)


def test_the_exception_of_the_first_failing_rank_is_raised_again() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("of rank 1")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(KeyError, match="of rank 1") as caught:
        run_ranks(work, 3)
    assert getattr(caught.value, "rank", None) == 1
    assert "raise KeyError" in str(caught.value.__cause__)
    assert f'File "{__file__}"' in str(caught.value.__cause__)
    assert time.monotonic() - started < 5


def test_an_exception_of_a_test_module_keeps_its_type() -> None:
    def work() -> None:
        raise PlainError("here")

    with pytest.raises(PlainError, match="here"):
        run_ranks(work, 1)


def test_an_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    def work() -> None:
        raise OddError("salt", "pepper")

    with pytest.raises(RuntimeError, match="OddError: salt and pepper"):
        run_ranks(work, 1)


def test_a_failed_assertion_explains_itself() -> None:
    def work() -> None:
        value = [1, 2]
        assert value == [1, 3]

    with pytest.raises(AssertionError, match=r"assert \[1, 2\] == \[1, 3\]"):
        run_ranks(work, 1)


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match="a rank returned a lock, which cannot be pickled"):
        run_ranks(threading.Lock, 1)


def test_a_rank_that_dies_is_reported_with_its_last_words() -> None:
    def killed() -> None:
        print("my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDiedError, match=r"(?s)signal 9 \(SIGKILL\).*my last words"):
        run_ranks(killed, 1)
    with pytest.raises(RankDiedError, match="exit code 13"):
        run_ranks(partial(os._exit, 13), 1)
    with pytest.raises(SystemExit) as caught:
        run_ranks(partial(sys.exit, 3), 1)
    assert caught.value.code == 3


def test_a_hang_is_killed_at_its_limit_and_the_ranks_and_their_places_are_named(tmp_path: Path) -> None:
    def work_that_waits_for_ever() -> None:
        rank = int(os.environ["RANK"])
        (tmp_path / f"{rank}").write_text(str(os.getpid()))
        if rank == 1:
            return
        dist.init_process_group("gloo")

    started = time.monotonic()
    with pytest.raises(HungError) as caught:
        run_ranks(work_that_waits_for_ever, 3, limit_s=2, join=None)
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert "ranks 0, 2 of 3 did not end within 2 s" in text
    assert "ranks 1 had ended" in text
    assert text.count("in work_that_waits_for_ever") == 2
    assert f'File "{__file__}"' in text
    assert not any(alive(int(file.read_text())) for file in tmp_path.iterdir())


def test_a_hang_after_the_function_is_a_hang() -> None:
    def work() -> None:
        threading.Thread(target=time.sleep, args=(60,)).start()

    with pytest.raises(HungError, match="after its function had returned"):
        run_ranks(work, 1, limit_s=1)


@pytest.mark.parametrize("detached", [False, True])
def test_a_process_that_is_left_fails_the_test(tmp_path: Path, detached: bool) -> None:
    def work() -> None:
        if not detached:
            process = subprocess.Popen(NAP)
            (tmp_path / "pid").write_text(str(process.pid))
        elif os.fork() == 0:  # a daemon: its parent is gone, its session its own, its environment empty
            os.setsid()
            if os.fork() == 0:
                (tmp_path / "pid").write_text(str(os.getpid()))
                os.execve(NAP[0], NAP, {})
            os._exit(0)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)

    with pytest.raises(LeakedError, match="1 left behind"):
        run_ranks(work, 1)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_workers_of_a_data_loader_are_not_left() -> None:
    def work() -> list[int]:
        numbers = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(numbers, batch_size=2, num_workers=2, persistent_workers=True)
        return list(next(iter(loader))[0].tolist())

    assert run_ranks(work, 2) == [[0, 1], [0, 1]]


def test_what_ranks_write_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    done = run_job(lambda: print("hello from", dist.get_rank()), 2, join="torch")
    assert done.outputs == ["hello from 0\n", "hello from 1\n"]
    assert capsys.readouterr().out == "[0] hello from 0\n[1] hello from 1\n"


def test_two_jobs_at_the_same_time() -> None:
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append(run_ranks(dist.get_rank, 2))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[0, 1], [0, 1]]


def test_twenty_jobs_in_a_row() -> None:
    for _ in range(20):
        assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_a_command_gives_its_exit_code_and_its_text() -> None:
    code = "import os, sys; print(input(), os.environ['X']); sys.stderr.write('e'); sys.exit(3)"
    result = run_command([sys.executable, "-c", code], env={"X": "1"}, stdin="typed\n")
    assert (result.rc, result.out, result.err) == (3, "typed 1\n", "e")
    with pytest.raises(AssertionError, match="exit code 3"):
        result.ok()


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"setsid sleep 61 & echo $! > {tmp_path}/pid; echo begun; sleep 62"
    with pytest.raises(HungError, match="begun"):
        run_command(["sh", "-c", script], limit_s=0.5)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_command_that_leaves_a_process_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "GRACE_S", 0.5)
    script = f"setsid sleep 63 & echo $! > {tmp_path}/pid"
    with pytest.raises(LeakedError, match="sleep 63"):
        run_command(["sh", "-c", script])
    assert not alive(int((tmp_path / "pid").read_text()))
