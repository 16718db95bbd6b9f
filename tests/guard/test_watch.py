"""The watch, on records that a test writes; and the guard as people meet it, through `instep run`."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from instep.guard import storage
from instep.guard.folders import make_folder
from instep.guard.processes import Processes, catches, descendants
from instep.guard.records import Beat, Frame, Group, Op, Snapshot
from instep.guard.verdicts import Verdict, Waiting
from instep.guard.watch import Found, Watch
from tests.commands import run_command
from tests.launch.jobs import INSTEP, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from instep.guard.records import View

TORCH = Frame("/x/torch/distributed/distributed_c10d.py", 3, "all_reduce", user=False)
WAITING = Waiting(0, "all_reduce", 3, (4,), "Float", "0", "train.py", 7)
PROOF = Verdict("missing", proven=True, ranks=(1,), waiting=(WAITING,))
SUSPICION = Verdict("blocked", proven=False, ranks=(1,))
SILENT = Verdict("mismatch", proven=True, ranks=(1,), silent=True)


class Ranks:
    """Recorders of two ranks: rank 0 waits in a collective, rank 1 is elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers = [storage.BeatWriter(folder, rank) for rank in range(2)]
        self.begin = time.monotonic()
        self.asked = [3, 2]
        self.still = [True, True]
        self.frames = [(TORCH, Frame("train.py", 7, "step", user=True)), (Frame("train.py", 9, "load", user=True),)]

    def beat(self) -> None:
        now = time.monotonic()
        for rank, writer in enumerate(self.writers):
            groups = [("0", (0, 1), self.asked[rank])]
            still_s = now - self.begin if self.still[rank] else 0.0
            stack = [(one.file, one.line, one.function, one.user, one.lasti) for one in self.frames[rank]]
            writer.write(now, groups, stack, still_s, None)
            beat = Beat(rank, os.getpid(), writer.count, now, (Group(*groups[0]),), self.frames[rank], still_s)
            op = Op("0", 3, "all_reduce", ((4,),), ("Float",), False, self.frames[0], time.time_ns() - int(5e9))
            storage.write_snapshot(self.folder, Snapshot(beat, (op,) if rank == 0 else (), self.frames[rank]))


class Judge:
    """Says what the test wants, and keeps what it was shown."""

    def __init__(self, says: Verdict | None) -> None:
        self.says = says
        self.shown: list[tuple[float, Sequence[View]]] = []

    def __call__(self, views: Sequence[View]) -> Verdict | None:
        self.shown.append((time.monotonic(), views))
        return self.says


def _watch_for(
    folder: Path, judge: Judge, limit_s: float, *, each: Callable[[Ranks, Watch], None] | None = None, **options: Any
) -> tuple[Found | None, Watch, float]:
    """Watch until something is found, or for so long."""
    ranks = Ranks(folder)
    watch = Watch(folder, 2, "vm", decide=judge, **{"suspect_s": 1.0, **options})
    pids = dict.fromkeys(range(2), os.getpid())
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s:
        ranks.beat()
        if each:
            each(ranks, watch)
        found = watch.look(pids, {})
        if found:
            return found, watch, time.monotonic() - begin
        time.sleep(0.02)
    return None, watch, limit_s


def test_a_proof_is_looked_at_twice(tmp_path: Path) -> None:
    judge = Judge(PROOF)
    found, _, _ = _watch_for(tmp_path, judge, 10)
    assert found is not None
    assert found.verdict == PROOF
    assert len(judge.shown) == 2
    assert judge.shown[1][0] - judge.shown[0][0] >= 0.2
    views = found.views
    assert [view.process.state for view in views] == ["R", "R"]
    assert views[0].snapshot is not None
    assert views[0].age_s < 1
    assert found.after_s is not None
    assert 5 <= found.after_s < 10  # since the operation that is not matched was asked for


def test_no_verdict_on_a_race(tmp_path: Path) -> None:
    judge = Judge(PROOF)

    def each(ranks: Ranks, watch: Watch) -> None:
        del ranks, watch
        judge.says = PROOF if len(judge.shown) % 2 == 0 else None

    assert _watch_for(tmp_path, judge, 1.5, each=each)[0] is None
    assert len(judge.shown) > 2


def test_a_suspicion_must_stand(tmp_path: Path) -> None:
    found, _, seconds = _watch_for(tmp_path, Judge(SUSPICION), 10, suspect_s=1.0)
    assert found is not None
    assert seconds >= 1.0


def test_a_suspicion_does_not_stand_while_ranks_go_on(tmp_path: Path) -> None:
    begin = time.monotonic()

    def each(ranks: Ranks, watch: Watch) -> None:
        del watch
        ranks.asked[1] = 2 + int((time.monotonic() - begin) / 0.25)
        judge.says = SUSPICION if len(judge.shown) % 3 else None  # a rank that sleeps between two steps

    judge = Judge(SUSPICION)
    assert _watch_for(tmp_path, judge, 3.2, each=each, suspect_s=1.0)[0] is None
    assert len(judge.shown) > 2


def test_nothing_is_asked_while_all_move(tmp_path: Path) -> None:
    judge = Judge(PROOF)

    def each(ranks: Ranks, watch: Watch) -> None:
        del watch
        ranks.still = [False, False]

    assert _watch_for(tmp_path, judge, 1.5, each=each)[0] is None
    assert judge.shown == []
    assert not (tmp_path / "ask").exists()


def test_a_fault_in_silence_is_found_while_all_move_and_said_once(tmp_path: Path) -> None:
    def each(ranks: Ranks, watch: Watch) -> None:
        ranks.still = [False, False]
        watch._began_at = (watch._began_at or 0.0) - 5  # the time of minutes

    judge = Judge(SILENT)
    found, watch, _ = _watch_for(tmp_path, judge, 10, each=each)
    assert found is not None
    assert found.verdict.silent
    for _ in range(100):
        assert watch.look({}, {}) is None
        time.sleep(0.01)


def test_who_works_while_others_wait(tmp_path: Path) -> None:
    def each(ranks: Ranks, watch: Watch) -> None:
        ranks.begin = time.monotonic() - 21
        ranks.still = [True, False]

    found, watch, _ = _watch_for(tmp_path, Judge(None), 1, each=each)
    assert found is None
    assert watch.take_notes() == ["rank 1 works (train.py:9 load()), rank 0 waits for it since 21 s"]
    assert watch.take_notes() == []


def test_what_the_system_says() -> None:
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    try:
        time.sleep(0.1)
        processes = Processes(lambda rank: f"words of {rank}")
        asleep = processes.view(0, pid, None)
        assert (asleep.alive, asleep.state, asleep.busy) == (True, "S", 0.0)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert processes.view(0, pid, None).state == "T"
        assert pid in descendants(os.getpid())
        assert not catches(pid, storage.STACKS_SIGNAL)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not processes.view(0, pid, None).alive
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ended = processes.view(0, pid, 134)
    assert (ended.alive, ended.exit_code, ended.last_words) == (False, 134, "words of 0")
    assert processes.view(0, pid, 0).last_words == ""


def test_a_busy_process_is_seen() -> None:
    processes = Processes()
    begin = time.process_time()
    processes.sample(0, os.getpid())
    while time.process_time() - begin < 0.3:
        pass
    assert processes.view(0, os.getpid(), None).busy > 0.02


# Through `instep run`


HEAD = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(100)
for _ in range(3):
    dist.all_reduce(x)
"""
MISSING = HEAD + "if rank != 1:\n    dist.barrier()  # HERE\nelse:\n    dist.broadcast(x, 0)\ndist.barrier()\n"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, torch=True)


def test_ranks_out_of_step(place: Place) -> None:
    place.write("train.py", MISSING)
    result = place.run("--nproc", 3, "--json", "train.py", limit_s=60)
    assert result.rc == 86, str(result)
    said = re.findall(r"^✗ ranks out of step — (\d+\.\d) s after it happened$", result.err, re.MULTILINE)
    assert len(said) == 1, str(result)
    assert "Traceback" not in result.err  # nothing else is reported as the cause
    assert re.search(
        r"job ended \(exit code 86\)\. Stacks of all ranks: runs/\S+/stacks   ·   again: instep why runs/", result.err
    )
    record = place.record()
    assert (record["outcome"], record["exit_code"]) == ("out of step", 86)
    folder = place.runs[0]
    desync = json.loads((folder / "desync.json").read_text())
    assert (desync["kind"], desync["ranks"], desync["silent"]) == ("mismatch", [1], False)
    assert desync["detected_after_s"] < 10
    for rank in range(3):
        text = (folder / "stacks" / f"rank-{rank}.txt").read_text()
        assert f"rank {rank} on " in text
        assert "all threads, innermost frame first:" in text
        assert "train.py" in text
    why = run_command([INSTEP, "why", folder, "--json"], limit_s=20, cwd=place.path).ok()
    assert json.loads(why.out) == desync == json.loads(result.out)["desync"]


def test_only_warned(place: Place) -> None:
    place.write("stuck.py", MISSING.replace('"gloo")', '"gloo", timeout=datetime.timedelta(seconds=4))'))
    result = place.run("--nproc", 3, "--guard", "warn", "stuck.py", limit_s=60)
    assert result.rc == 1, str(result)  # as it ends by itself: torch's own timeout
    assert result.err.count("✗ ranks out of step") == 1
    assert "the job goes on (--guard warn)" in result.err
    assert place.record()["outcome"] == "failed"
    assert (place.runs[0] / "desync.json").exists()


@pytest.mark.parametrize("words", [["--no-guard"], ["--guard", "off"]])
def test_off(tmp_path: Path, words: list[str]) -> None:
    place = Place(tmp_path, torch=False)
    place.write("train.py", "import os\nprint(os.environ.get('INSTEP_GUARD'))\n")
    assert place.run("--nproc", 2, *words, "train.py", env={"INSTEP_GUARD": "/of/another/run"}).ok().out == "None\n"


def test_one_rank_finishes_early(place: Place) -> None:
    """What its peers say, 'Connection closed by peer', is not the cause."""
    place.write(
        "train.py", HEAD + "if rank == 1:\n    sys.exit()  # HERE\nfor _ in range(5):\n    dist.all_reduce(x)\n"
    )
    result = place.run("--nproc", 3, "train.py", limit_s=60)
    assert result.rc == 86, str(result)
    assert "✗ ranks out of step" in result.err
    assert " failed: " not in result.err
    desync = json.loads((place.runs[0] / "desync.json").read_text())
    assert desync["ranks"] == [1]


def test_gloo_aborts(place: Place) -> None:
    place.write("train.py", HEAD + "y = torch.ones(50 if rank == 1 else 200)\ndist.all_reduce(y)\n")
    result = place.run("--nproc", 2, "train.py", limit_s=60)
    assert result.rc == 86, str(result)
    desync = json.loads((place.runs[0] / "desync.json").read_text())
    assert desync["kind"] == "mismatch"
    assert "50" in json.dumps(desync)
    assert "200" in json.dumps(desync)
    aborted = [rank for rank in range(2) if "Fatal Python error: Aborted" in place.log(rank)]
    assert aborted  # with its stack in its log, as without the guard


@pytest.mark.parametrize("fail", ["raise ValueError('own')", "os.kill(os.getpid(), 9)", "os._exit(3)", "os.abort()"])
def test_a_rank_that_fails_by_itself_is_no_desync(place: Place, fail: str) -> None:
    place.write("train.py", HEAD + f"if rank == 1:\n    {fail}\nfor _ in range(5):\n    dist.all_reduce(x)\n")
    result = place.run("--nproc", 3, "train.py", limit_s=60)
    record = place.record()
    assert (record["outcome"], record["first_failure"]["rank"]) == ("failed", 1), str(result)
    assert "out of step" not in result.err
    assert not (place.runs[0] / "desync.json").exists()


def test_the_records_go_with_the_job(tmp_path: Path) -> None:
    place = Place(tmp_path, torch=False)
    script = "import os, time, pathlib\npathlib.Path('dir').write_text(os.environ['INSTEP_GUARD'])\n"
    place.write("train.py", script)
    place.run("--nproc", 2, "train.py").ok()
    assert not Path((place.path / "dir").read_text()).exists()
    (place.path / "dir").unlink()
    place.write("train.py", script + "pathlib.Path('here').touch()\ntime.sleep(60)\n")
    with place.started("--nproc", 2, "train.py") as job:
        job.wait_for("here")
        folder = Path((place.path / "dir").read_text())
        assert folder.exists()
        job.signal(signal.SIGKILL)  # also where the launcher is killed
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not folder.exists()


def test_what_a_killed_job_left_is_removed_by_the_next() -> None:
    mine, lock = make_folder()
    os.close(lock)  # its launcher has gone
    held, lock = make_folder()
    for folder in (mine, held):
        os.utime(folder, (1, 1))
    new, new_lock = make_folder()
    try:
        assert (mine.exists(), held.exists(), new.exists()) == (False, True, True)
    finally:
        for one in (lock, new_lock):
            os.close(one)
        for folder in (held, new):
            (folder / "lock").unlink()
            folder.rmdir()


def test_a_guard_that_fails_does_no_harm(place: Place) -> None:
    """Its folder is taken away while the job runs."""
    place.write(
        "train.py",
        f"{HEAD}import shutil\nif rank == 0:\n    shutil.rmtree(os.environ['INSTEP_GUARD'])\ntime.sleep(1)\ndist.barrier()\nprint('done')\n",
    )
    result = place.run("--nproc", 2, "train.py", limit_s=60).ok()
    assert result.out == "done\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--guard", "maybe"], "--guard maybe is not known"),
        (["--guard-suspect", "0"], "--guard-suspect 0 is too short"),
        (["--guard-suspect", "nan"], "--guard-suspect nan is too short"),
    ],
)
def test_mistakes(place: Place, words: list[str], said: str) -> None:
    place.write("train.py", "")
    result = place.run(*words, "train.py")
    assert result.rc == 2
    assert said in result.err
