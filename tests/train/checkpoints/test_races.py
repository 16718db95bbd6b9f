"""R5 and R15: whoever looks, whenever the job is killed, there is a whole checkpoint; a full disk takes none away."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import instep
from instep.train.checkpoints import CheckpointFolder, names
from tests.harness import RankDiedError, run_job, run_ranks
from tests.needs import need_root
from tests.train.checkpoints.states import hidden, save, standing, state_of, step_in

if TYPE_CHECKING:
    from collections.abc import Iterator

DELAY_S = 0.02


class Watcher(threading.Thread):
    """Another process than the ranks': it loads the newest checkpoint again and again."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.stop = path, threading.Event()
        self.seen: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.wait(0.01):
                self.look()
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            self.error = error

    def look(self) -> None:
        folder, state = CheckpointFolder(self.path), state_of(-1)
        found = folder.find("latest")
        if found is None:
            assert not self.seen, "there was a checkpoint, and now there is none"
            return
        folder.load(found, state)
        assert step_in(state) == found.step
        self.seen.append(found.step)


def test_R5_thirty_saves_with_one_kept_and_somebody_always_reading(tmp_path: Path) -> None:
    def work(path: str, steps: list[int], delay: float) -> None:
        slow_down(delay)
        folder = CheckpointFolder(path, keep=1, asynchronous=False)
        for step in steps:
            assert len(folder.save(step, state_of(step), {}, {}, {})) == 1
        folder.close()

    watcher = Watcher(tmp_path)
    watcher.start()
    run_ranks(work, 4, str(tmp_path), list(range(1, 31)), DELAY_S, limit_s=120)
    watcher.stop.set()
    watcher.join()
    assert watcher.error is None, repr(watcher.error)
    assert watcher.seen == sorted(watcher.seen)
    assert len(set(watcher.seen)) > 3
    assert len(standing(tmp_path)) <= 2  # the last one, and one that was being read
    run_ranks(work, 4, str(tmp_path), [31], 0.0)
    assert standing(tmp_path) == ["step-31"]
    assert hidden(tmp_path) == []


def test_R5_the_same_step_replaced_again_and_again_while_somebody_reads(tmp_path: Path) -> None:
    def work(path: str, delay: float) -> None:
        slow_down(delay)
        folder = CheckpointFolder(path, keep=1)
        for _ in range(15):
            folder.save(3, state_of(3), {}, {}, {})
        folder.close()

    watcher = Watcher(tmp_path)
    watcher.start()
    run_ranks(work, 2, str(tmp_path), DELAY_S, limit_s=60)
    watcher.stop.set()
    watcher.join()
    assert watcher.error is None, repr(watcher.error)
    assert set(watcher.seen) == {3}
    assert standing(tmp_path) == ["step-3"]


def slow_down(delay: float) -> None:
    """Listing and removal take their time, as on a network."""
    list_it, remove = Path.iterdir, shutil.rmtree

    def iterdir(path: Path) -> Iterator[Path]:
        time.sleep(delay)
        return list_it(path)

    def rmtree(*args: Any, **kwargs: Any) -> None:
        time.sleep(delay)
        remove(*args, **kwargs)

    Path.iterdir = iterdir  # type: ignore[method-assign, assignment]
    shutil.rmtree = rmtree  # type: ignore[assignment]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_R15_killed_at_a_random_moment_of_a_save(
    tmp_path: Path, asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six attempts, each resumes where the one before was killed, and is killed in its turn: twelve with both ways."""
    size, log = 100_000, tmp_path / "log.txt"  # 5 MB
    path = tmp_path / "checkpoints"

    def work(after: float | None) -> int:
        folder = CheckpointFolder(path, keep=1, asynchronous=asynchronous)
        state, step = state_of(0, size), 0
        found = folder.find("latest")
        if found is not None:
            folder.load(found, state)
            step = found.step
            assert step_in(state) == step
        if after is None:
            return step
        if instep.is_main():
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            step += 1
            for one in folder.save(step, state_of(step, size), {}, {}, {}):
                if instep.is_main():
                    with log.open("a") as file:
                        file.write(f"{one.name}\n")

    chance = random.Random(15 + asynchronous)
    named = 0
    for _ in range(6):
        before = unfinished(path)
        with pytest.raises(RankDiedError):
            run_ranks(work, 2, chance.uniform(0.05, 0.4))
        output = capsys.readouterr().out
        for name in before:
            assert f"passed over {name}" in output
            named += 1
        if log.exists():
            assert standing(path), "no checkpoint is left"
    last = log.read_text().splitlines()[-1]
    before = unfinished(path)
    done = run_job(work, 2, None)
    assert len(set(done.values)) == 1
    assert done.values[0] >= int(last.partition("-")[2])  # what was said to stand, stands
    assert all(f"passed over {name}" in done.outputs[0] for name in before)
    assert named + len(before) > 0, "no kill has hit a save"
    # The next job cleans up.
    run_ranks(lambda: CheckpointFolder(path).prepare(), 1)
    assert hidden(path) == []


def unfinished(path: Path) -> list[str]:
    return [name for name in hidden(path) if ".partial-" in name] if path.exists() else []


def test_R15_killed_while_it_replaces_a_step(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 8)
    folder.close()
    dead = names.aside(8, "replaced").replace(f"-{os.getpid()}-", "-999999999-")
    (tmp_path / "step-8").rename(tmp_path / dead)
    found = folder.find("latest")  # between the two renames it is still there
    assert found is not None
    assert found.path.name == dead
    folder.load(found, state := state_of(0))
    assert step_in(state) == 8
    folder.prepare()
    assert standing(tmp_path) == ["step-8"]
    assert hidden(tmp_path) == []
    folder.close()


def test_a_live_job_in_the_same_folder_loses_nothing(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        born = names._born(other.pid)
        mine = names.aside(3, "partial").rsplit("-", 3)[0]
        alive, dead = tmp_path / f"{mine}-{other.pid}-{born}-0", tmp_path / f"{mine}-{other.pid}-{born - 1}-0"
        elsewhere = tmp_path / ".step-3.partial-otherhost-1-77-88-0"
        silent = tmp_path / ".step-4.partial-otherhost-1-77-88-0"
        (tmp_path / dead.name.replace("step-3.partial", "step-0.seen")).write_bytes(b"")
        for one in (alive, dead, elsewhere, silent):
            one.mkdir()
        os.utime(silent, (time.time() - 7200,) * 2)
        folder = CheckpointFolder(tmp_path)
        folder.prepare()
        assert hidden(tmp_path) == sorted([alive.name, elsewhere.name])
        folder.close()
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_R15_full_disk_on_one_rank_leaves_the_old_one(tmp_path: Path, asynchronous: bool) -> None:
    size = 100_000  # 5 MB

    def work() -> Any:
        folder = CheckpointFolder(tmp_path, keep=1, asynchronous=asynchronous)
        assert len(save(folder, 1, size)) == 1
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if instep.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        assert save(folder, 2, size) == []
        text = str(folder.failure)
        there = standing(tmp_path), unfinished(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert len(save(folder, 3, size)) == 1
        assert folder.failure is None
        folder.close()
        return text, there

    done = run_job(work, 2)
    (text, there), other = done.values
    assert (text, there) == other
    assert there == (["step-1"], [])
    assert "step 2 could not be written" in text
    assert "rank 1 on" in text
    assert os.strerror(errno.EFBIG) in text
    assert done.outputs[0].count("could not be written") == 1  # one warning, of the main rank
    assert "WARNING" in done.outputs[0]
    assert "could not be written" not in done.outputs[1]
    assert standing(tmp_path) == ["step-3"]


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    need_root()
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine does not let root mount: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_R15_a_disk_that_is_really_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "6m"):
        folder = CheckpointFolder(disk / "checkpoints", keep=1)
        assert len(save(folder, 1, 100_000)) == 1
        assert save(folder, 2, 100_000) == []
        assert standing(folder.path) == ["step-1"]
        assert hidden(folder.path) == []
        assert "No space left on device" in str(folder.failure)
        assert "No space left on device" in capsys.readouterr().err
        assert folder.find("latest") is not None
        folder.close()


def test_a_rank_that_cannot_copy_its_tensors_fails_the_save_on_all(tmp_path: Path) -> None:
    def work() -> Any:
        folder = CheckpointFolder(tmp_path)
        save(folder, 1)
        if instep.rank() == 1:

            def copy(tensors: object) -> Any:
                raise MemoryError("none left")

            folder._staging.copy = copy  # type: ignore[method-assign]
        assert save(folder, 2) == []
        text = str(folder.failure)
        folder.close()
        return text

    first, second = run_ranks(work, 2)
    assert first == second
    assert "rank 1 on" in first
    assert "none left" in first
    assert standing(tmp_path) == ["step-1"]
