"""``instep run --via slurm`` as a batch job of a real Slurm: submitted, watched, asked to save, started again.

Slurm needs its time (a requeued job starts after ten seconds, a time limit counts in minutes), so all jobs are started
at once, and each test looks at one of them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from tests import needs
from tests.commands import MARKER
from tests.launch.jobs import INSTEP, Place as Folder
from tests.real import slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.commands import Result
    from tests.real.slurm import Cluster

LIMIT_S = 150
SOON = "SchedulerParameters=sched_interval=2,sched_min_interval=100000\nMinJobAge=12\n"
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=train Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal\n"

# Counts to LAST, or 5 steps more than were saved; after every STOP steps, or when it is asked to, it saves and says so.
COUNT = """
    import os, signal, sys, time
    from pathlib import Path

    stop = int(sys.argv[2])
    asked = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(signal.Signals(number).name))
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    saved = Path(f"saved-{task}-{os.environ['RANK']}.txt")
    step = int(saved.read_text()) if saved.exists() else 0
    last = int(sys.argv[1]) if sys.argv[1] != "more" else step + 5 if step else 10**9
    print("begins at", step, "port", os.environ["MASTER_PORT"], flush=True)
    while step < last:
        step += 1
        time.sleep(0.1)
        if stop and step % stop == 0 and step < last:
            asked.append("itself")
        if asked:
            saved.write_text(str(step))
            print("saved at", step, "asked by", asked[0], flush=True)
            sys.exit(75)
        Path("runs." + os.environ["RANK"]).touch()
        if all(Path(f"runs.{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
            Path("runs.now").touch()
    print("done at", step, flush=True)
"""


class Place:
    """A folder to submit one job from."""

    def __init__(self, path: Path, cluster: Cluster) -> None:
        path.mkdir()
        self.path = path
        self.cluster = cluster
        self.env = Folder(path, torch=False).env
        (path / "count.py").write_text(dedent(COUNT))

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(dedent(text))

    def instep(self, *words: object, torch: bool = False, before: tuple[str, ...] = ()) -> Result:
        """``instep run --via slurm`` with these words, on the head."""
        argv = [*before, INSTEP, "run", "--via", "slurm", *map(str, words)]
        return self.cluster.run(argv, cwd=self.path, limit_s=LIMIT_S, env={} if torch else self.env)

    def run(self, *argv: str) -> Result:
        return self.cluster.run(argv, cwd=self.path, limit_s=60)

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while not what():
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.1)

    def begun(self) -> bool:
        return (self.path / "runs.now").exists()

    def folder(self, name: str = "job") -> Path:
        return self.path / "runs" / name

    def record(self, name: str = "job") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder(name) / "run.json").read_text())
        return found

    def log(self, rank: int = 0, name: str = "job") -> list[str]:
        return (self.folder(name) / "log" / f"rank-{rank}.txt").read_text().splitlines()

    def job(self) -> str:
        """The number of the job, as soon as it is there."""
        self.wait_for(lambda: (self.folder() / "run.json").exists() and self.record()["slurm_job"])
        return str(self.record()["slurm_job"])


# ---- the jobs


def ends(place: Place) -> Result:
    return place.instep("--nodes", 2, "-n", 2, "--name", "job", "--show", "all", "--follow", "count.py", 5, 0)


def fails(place: Place) -> Result:
    place.write(
        "fails.py", "import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\nimport time; time.sleep(60)\n"
    )
    return place.instep("--nodes", 2, "--name", "job", "--follow", "fails.py")


def saves(place: Place) -> Result:
    return place.instep("--nodes", 2, "--name", "job", "--follow", "count.py", 20, 10)


def saves_too_often(place: Place) -> Result:
    return place.instep("--max-requeues", 1, "--name", "job", "--follow", "count.py", 20, 5)


def array(place: Place) -> Result:
    return place.instep("--slurm", "--array=1-2", "--name", "job", "--follow", "count.py", 20, 10)


def time_limit(place: Place) -> Result:
    return place.instep("--slurm", "--time=1", "--before", 20, "--name", "job", "--follow", "count.py", "more", 0)


def asked(place: Place, script: str) -> Result:
    """SIGUSR1 to the batch script, as soon as the rank runs."""
    place.write("asked.py", script)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(place.instep, "--name", "job", "--follow", "asked.py")
        place.wait_for(place.begun)
        place.run("scancel", "--batch", "--signal=USR1", place.job()).ok()
        return result.result()


def asked_early(place: Place) -> Result:
    """The rank is still importing, as it were."""
    return asked(
        place,
        """
        import signal, sys, time
        from pathlib import Path
        if Path("saved").exists():
            sys.exit()
        Path("runs.now").touch()
        time.sleep(3)
        signal.signal(signal.SIGUSR1, lambda *_: Path("saved").touch() or sys.exit(75))
        time.sleep(60)
        """,
    )


def asked_in_vain(place: Place) -> Result:
    """The program knows nothing of it."""
    return asked(place, "import time\nopen('runs.now', 'w').close()\ntime.sleep(6)\nprint('not disturbed')\n")


def cancelled(place: Place) -> Result:
    """By scancel, while it runs; it saves all the same."""
    with ThreadPoolExecutor() as pool:
        result = pool.submit(place.instep, "--name", "job", "--follow", "count.py", "more", 0)
        place.wait_for(place.begun)
        place.run("scancel", place.job()).ok()
        return result.result()


def cancelled_without_saving(place: Place) -> Result:
    place.write("sleep.py", "import time\nopen('runs.now', 'w').close()\ntime.sleep(90)\n")
    with ThreadPoolExecutor() as pool:
        result = pool.submit(place.instep, "--name", "job", "--follow", "sleep.py")
        place.wait_for(place.begun)
        place.run("scancel", place.job()).ok()
        return result.result()


def cancelled_before_it_ran(place: Place) -> Result:
    with ThreadPoolExecutor() as pool:
        result = pool.submit(place.instep, "--slurm", "--hold", "--name", "job", "--follow", "count.py", 5, 0)
        place.run("scancel", place.job()).ok()
        return result.result()


def left_alone(place: Place) -> Result:
    """Ctrl-C ends the watching, and not the job."""
    before = ("env", "-u", MARKER, "timeout", "--preserve-status", "--signal=INT", "4")
    result = place.instep("--name", "job", "--follow", "count.py", 80, 0, before=before)
    place.wait_for(lambda: place.record()["outcome"] != "running")
    return result


def by_hand(place: Place) -> Result:
    """The file of --dry-run, submitted by the user."""
    text = place.instep("--dry-run", "--nodes", 2, "count.py", 5, 0).ok().out
    place.write("mine.sbatch", text)
    return place.cluster.run(["sbatch", "--wait", "mine.sbatch"], cwd=place.path, limit_s=LIMIT_S, env=place.env)


def odd_words(place: Place) -> Result:
    place.write("says.py", "import sys\nprint(sys.argv[1:])\n")
    return place.instep("--name", "a b", "--follow", "says.py", "$HOME", "it's", 'a "b"', "#no", "x\ny")


def no_python(place: Place) -> Result:
    """The interpreter is not there on the job's machine."""
    return place.instep("--name", "job", "--python", "/nowhere/python", "--follow", "count.py", 5, 0)


def forgotten(place: Place) -> Result:
    """Nobody watches; and after a while Slurm has forgotten it."""
    before = ("env", "-u", MARKER)
    result = place.instep("--name", "job", "--json", "count.py", 5, 0, before=before).ok()
    job = json.loads(result.out)["slurm_job"]
    place.wait_for(lambda: "Invalid job id" in place.run("squeue", "-j", job).err)
    return result


def preempted(place: Place) -> Result:
    """An urgent job takes its machine for a while."""
    return driven_out(place, "n1", "count.py", "more", 0)


def preempted_without_saving(place: Place) -> Result:
    script = """
        import os, time
        from pathlib import Path
        Path("runs.now").touch()
        time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else 60)
        """
    place.write("waits.py", script)
    return driven_out(place, "n2", "waits.py")


def driven_out(place: Place, node: str, *words: object) -> Result:
    with ThreadPoolExecutor() as pool:
        options = ["--hosts", node, "-n", 2, "--slurm", "--partition=train", "--slurm", "--exclusive"]
        result = pool.submit(place.instep, *options, "--name", "job", "--follow", *words)
        place.wait_for(place.begun)
        urgent = ["sbatch", "--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null"]
        place.run(*urgent, "--wrap", "sleep 1").ok()
        return result.result()


TRAIN = """
    import torch, instep, sys
    from pathlib import Path
    from torch.nn.functional import mse_loss

    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None] / 64, torch.arange(64.0)[:, None] / 32)

    @instep.train.on("step_end")
    def tell(trainer):
        import time
        Path("runs.now").touch()
        time.sleep(float(sys.argv[2]))

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    trainer = instep.Trainer(
        net, lambda weights: torch.optim.AdamW(weights, lr=0.01), data, loss=mse_loss, global_batch=8,
        epochs=8, callbacks=[tell], checkpoint=sys.argv[1], resume="auto",
    )
    end = trainer.fit()
    if instep.rank() == 0:
        torch.save(trainer.model.state_dict(), f"{sys.argv[1]}.pt")
        print("trained to step", end.step)
"""


def trains(place: Place) -> Result:
    """The trainer, told by SIGUSR1 to the batch script, as before a time limit; and the same in one piece."""
    place.write("train.py", TRAIN)
    with ThreadPoolExecutor() as pool:
        words = ["--nodes", 2, "--device", "cpu", "--follow"]
        result = pool.submit(lambda: place.instep(*words, "--name", "job", "train.py", "cut", "0.1", torch=True))
        place.wait_for(place.begun)
        place.run("scancel", "--batch", "--signal=USR1", place.job()).ok()
        place.instep(*words, "--name", "whole", "train.py", "whole", "0", torch=True).ok()
        return result.result()


CALM = {
    one.__name__: one
    for one in (
        *(ends, fails, saves, saves_too_often, array, time_limit, asked_early, asked_in_vain),
        *(cancelled, cancelled_without_saving),
        *(cancelled_before_it_ran, left_alone, by_hand, odd_words, no_python, forgotten, trains),
    )
}


@dataclass
class Jobs:
    """What has become of the jobs."""

    places: dict[str, Place]
    results: dict[str, Future[Result]]

    def __getitem__(self, name: str) -> tuple[Place, Result]:
        return self.places[name], self.results[name].result()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All of them, under way."""
    needs.need_namespaces()
    needs.need_tool(*slurm.TOOLS)
    root = tmp_path_factory.mktemp("sbatch")
    odd = root / "50% of 'it' %j"  # where all of them run
    odd.mkdir()
    with ExitStack() as at_end:
        calm = at_end.enter_context(slurm.cluster(cpus=16, extra=SOON, requeue_s=5))
        asking = at_end.enter_context(slurm.cluster(["n1"], extra=SOON + PREEMPTION + USER_SIGNAL, requeue_s=5))
        plain = at_end.enter_context(slurm.cluster(extra=SOON + PREEMPTION, requeue_s=5))
        pool = at_end.enter_context(ThreadPoolExecutor(len(CALM) + 3))
        found = Jobs({}, {})
        # Those that take the longest are begun first.
        order = sorted(CALM.items(), key=lambda item: item[0] not in {"time_limit", "trains"})
        starts = [*order[:1], ("preempted", preempted), ("preempted plainly", preempted), *order[1:]]
        starts.append(("preempted without saving", preempted_without_saving))
        for name, start in starts:
            others = {"preempted": asking, "preempted plainly": plain, "preempted without saving": plain}
            cluster = others.get(name, calm)
            # A relative path in a file of the user's own is below the working folder, whose % Slurm replaces.
            found.places[name] = Place((root if name == "by_hand" else odd) / name, cluster)
            found.results[name] = pool.submit(start, found.places[name])
        yield found


# ---- what has become of them


def test_a_job_is_watched_to_its_end(jobs: Jobs) -> None:
    place, result = jobs["ends"]
    result.ok()
    assert sorted(re.findall(r"\[rank (\d) on (n\d)\] done at 5", result.out)) == [
        *[("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")]
    ], result
    record = place.record()
    assert (record["outcome"], record["exit_code"], record["world_size"]) == ("finished", 0, 4)
    assert (record["via"], record["hosts"], record["requeues"]) == ("slurm", ["n1", "n2"], 0)
    assert f"Slurm job {record['slurm_job']}" in result.err
    assert f"… job {record['slurm_job']} runs on n[1-2]" in result.err
    assert record["command"][:4] == ["instep", "run", "--via", "slurm"]
    assert "--continue-run" in (place.folder() / "job.sbatch").read_text()
    assert (place.folder() / "slurm.txt").read_text() == result.out


def test_its_exit_code_is_that_of_the_run(jobs: Jobs) -> None:
    place, result = jobs["fails"]
    assert result.rc == 3, result
    assert "rank 1 on n2 failed" in result.out
    assert "requeued" not in result.out
    assert place.record()["outcome"] == "failed"


def test_a_script_that_exits_75_is_started_again_and_goes_on(jobs: Jobs) -> None:
    place, result = jobs["saves"]
    result.ok()
    assert result.out.count("requeued, restart 1 of at most 100") == 1, result
    assert "is requeued (restart 1)" in result.err
    record = place.record()
    assert (record["outcome"], record["exit_code"], record["requeues"]) == ("finished", 0, 1)
    assert record["seconds"] > 6  # from the first start
    assert record["exit_codes"] == {"0": 0, "1": 0}
    for rank in (0, 1):
        log = place.log(rank)
        begins = [line for line in log if line.startswith("begins")]
        assert [line.split()[2] for line in begins] == ["0", "10"]
        assert len({line.split()[4] for line in begins}) == 1, "the port is the same"
        assert [line for line in log if line.startswith("--- started again by Slurm, restart 1")]
        assert log[-1] == "done at 20"


def test_no_more_often_than_is_allowed(jobs: Jobs) -> None:
    place, result = jobs["saves_too_often"]
    assert result.rc == 75, result
    assert result.out.count("↻ requeued") == 1
    assert "not requeued: it was started again 1 times (--max-requeues 1)" in result.out
    assert (place.record()["outcome"], place.record()["requeues"]) == ("preempted", 1)


def test_each_task_of_an_array_has_its_folder(jobs: Jobs) -> None:
    place, result = jobs["array"]
    result.ok()
    assert not (place.folder() / "run.json").exists()
    number = re.findall(r"Slurm job (\d+)", result.err)[0]
    for task in ("1", "2"):
        record = place.record(f"job-{task}")
        assert (record["outcome"], record["requeues"]) == ("finished", 1)
        assert record["slurm_job"] == f"{number}_{task}"
        assert place.log(0, f"job-{task}")[-1] == "done at 20"
        assert "requeued, restart 1" in (place.folder() / f"slurm-{task}.txt").read_text()
        assert f"job-{task}: finished" in result.err


def test_before_the_time_limit_all_save_and_the_job_goes_on(jobs: Jobs) -> None:
    place, result = jobs["time_limit"]
    result.ok()
    log = place.log()
    saved = [line for line in log if line.startswith("saved")]
    assert saved
    assert all("asked by SIGUSR1" in line for line in saved), log
    assert log[-1].startswith("done at")
    assert place.record()["requeues"] == len(saved) == result.out.count("↻ requeued")


def test_the_signal_waits_for_a_rank_that_does_not_catch_it_yet(jobs: Jobs) -> None:
    place, result = jobs["asked_early"]
    result.ok()
    assert (place.record()["outcome"], place.record()["requeues"]) == ("finished", 1)

    place, result = jobs["asked_in_vain"]
    assert "not disturbed" in result.ok().out
    assert (place.record()["outcome"], place.record()["requeues"]) == ("finished", 0)


@pytest.mark.parametrize(("name", "number"), [("preempted", "SIGUSR1"), ("preempted plainly", "SIGTERM")])
def test_preemption_saves_and_the_job_goes_on(jobs: Jobs, name: str, number: str) -> None:
    place, result = jobs[name]
    result.ok()
    for rank in (0, 1):
        (saved,) = [line for line in place.log(rank) if line.startswith("saved")]
        assert f"asked by {number}" in saved
        assert place.log(rank)[-1].startswith("done at")
    record = place.record()
    assert (record["outcome"], record["requeues"]) == ("finished", 1)
    assert result.out.count("↻ requeued") == 1


def test_preemption_of_a_program_that_does_not_save_has_it_begin_anew(jobs: Jobs) -> None:
    place, result = jobs["preempted without saving"]
    result.ok()
    assert "has not said that it saved (exit code 75)" in result.out
    assert (place.record()["outcome"], place.record()["requeues"]) == ("finished", 1)


def test_what_is_cancelled_stays_cancelled(jobs: Jobs) -> None:
    place, result = jobs["cancelled"]
    assert result.rc == 75, result
    record = place.record()
    assert (record["outcome"], record["requeues"]) == ("preempted", 0)
    assert "… not requeued: " in result.out

    place, result = jobs["cancelled_without_saving"]
    assert result.rc == 143, result
    assert (place.record()["outcome"], place.record()["signal"]) == ("interrupted", "SIGTERM")

    place, result = jobs["cancelled_before_it_ran"]
    assert result.rc == 143, result
    assert "waits: JobHeldUser" in result.err
    assert (place.record()["outcome"], place.record()["exit_code"]) == ("interrupted", 143)
    assert place.record()["first_failure"]["message"] == "Slurm says CANCELLED"


def test_ctrl_c_leaves_the_job_alone(jobs: Jobs) -> None:
    place, result = jobs["left_alone"]
    assert result.rc == 130, result
    assert f"the job goes on without you: instep logs {near('job')} --follow   ·   stop it: scancel" in result.err
    assert place.record()["outcome"] == "finished"


def near(name: str) -> str:
    return f"runs/{name}"


def test_the_file_of_a_dry_run_can_be_submitted_by_hand(jobs: Jobs) -> None:
    place, result = jobs["by_hand"]
    job = re.findall(r"\d+", result.ok().out)[0]
    record = place.record(f"count-{job}")
    assert (record["outcome"], record["world_size"], record["slurm_job"]) == ("finished", 2, job)
    assert "✓ finished" in (place.path / f"count-{job}.txt").read_text()


def test_words_arrive_as_they_were_typed(jobs: Jobs) -> None:
    place, result = jobs["odd_words"]
    result.ok()
    assert repr(["$HOME", "it's", 'a "b"', "#no", "x\ny"]) in result.out
    assert place.record("a b")["outcome"] == "finished"


def test_a_job_whose_launcher_cannot_start_has_an_end_all_the_same(jobs: Jobs) -> None:
    place, result = jobs["no_python"]
    assert result.rc == 127, result
    assert "/nowhere/python" in result.out
    assert "Slurm says FAILED (exit code 127)" in result.err
    assert place.record()["outcome"] == "failed"


def test_the_end_is_there_when_slurm_has_forgotten_the_job(jobs: Jobs) -> None:
    place, result = jobs["forgotten"]
    assert json.loads(result.out)["folder"] == str(place.folder())
    assert place.record()["outcome"] == "finished"


def test_the_trainer_goes_on_where_it_was(jobs: Jobs) -> None:
    import torch

    place, result = jobs["trains"]
    result.ok()
    record = place.record()
    assert (record["outcome"], record["requeues"]) == ("finished", 1)
    assert "trained to step 64" in result.out
    cut, whole = (torch.load(place.path / f"{name}.pt") for name in ("cut", "whole"))
    for name, value in whole.items():
        assert torch.equal(cut[name], value), name


# ---- what Slurm refuses


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--partition=nope", "invalid partition specified: nope"),
        ("--nonsense", "unrecognized option '--nonsense'"),
        ("--time=abc", "Invalid --time specification"),
        ("--gres=gpu:1", "Invalid generic resource"),
        ("--nodelist=n9", "Invalid node name specified"),
    ],
)
def test_an_option_that_slurm_refuses(jobs: Jobs, tmp_path: Path, option: str, words: str) -> None:
    place = Place(tmp_path / "x", jobs.places["ends"].cluster)
    result = place.instep("--name", "job", "--slurm", "--comment=fine", "--slurm", option, "count.py", 5, 0)
    assert result.rc == 2
    assert words in result.err
    (line,) = [line for line in result.err.splitlines() if "job.sbatch, line" in line]
    assert line.endswith(f"#SBATCH {option}")
    assert f"→ change  --slurm {option}" in result.err
    assert not place.folder().exists()  # the name is free for the next attempt


def test_a_machine_without_slurm(tmp_path: Path) -> None:
    folder = Folder(tmp_path, torch=False)
    folder.write("count.py", COUNT)
    result = folder.run("--via", "slurm", "count.py", 5, 0, env={"PATH": str(Path(sys.executable).parent)})
    assert result.rc == 2
    assert "there is no Slurm on this machine" in result.err
    assert not folder.runs


def test_a_machine_that_belongs_to_no_cluster(tmp_path: Path) -> None:
    needs.need_tool("scontrol")
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    folder = Folder(tmp_path, torch=False)
    folder.write("count.py", COUNT)
    result = folder.run("--via", "slurm", "count.py", 5, 0)
    assert result.rc == 2
    assert "but it belongs to no cluster" in result.err
    assert not folder.runs


@pytest.mark.parametrize("words", [["--slurm", "--time=1"], ["--follow"]])
def test_options_of_sbatch_want_a_job(tmp_path: Path, words: list[str]) -> None:
    folder = Folder(tmp_path, torch=False)
    folder.write("count.py", COUNT)
    result = folder.run(*words, "count.py", 5, 0)
    assert result.rc == 2
    assert f"{' '.join(words)} is for a job that is submitted" in result.err
