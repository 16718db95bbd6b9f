"""`instep stop`: by the launcher, by the marker where it has gone, on all machines; other runs are not touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from instep.launch.registry import ending
from instep.runs import launcher
from tests.cli.machines import INSTEP, write_record
from tests.commands import Result, run_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.machines import Machines
    from tests.launch.jobs import Place

SCRIPT = """
    import os, pathlib, signal, sys, time

    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("up" + os.environ["RANK"]).touch()
    time.sleep(60)
"""
# Carries a run's variables, as a process that was left behind does.
LEFT = """
import signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def stop(folder: Path, *words: object, limit_s: float = 40) -> Result:
    return run_command([INSTEP, "stop", *map(str, words)], limit_s=limit_s, cwd=folder)


def left_behind(job: str, kind: str = "good") -> subprocess.Popen[str]:
    started = subprocess.Popen(
        ["python3", "-c", LEFT, kind], env={**os.environ, "INSTEP_JOB": job}, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    return started


def test_a_run_that_goes_on(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--nproc", 2, "--name", "mine", "train.py") as run:
        run.wait_for("up0", "up1")
        preview = stop(tmp_path, "runs/mine/", "--dry-run").ok().out
        assert f"SIGTERM to its launcher here, pid {run.process.pid}" in preview
        assert preview.count("zygote.py") == 3
        assert run.process.poll() is None
        result = stop(tmp_path, "mine").ok()
        assert "■ nothing is left of mine · " in result.err
        assert result.seconds < 5
        assert run.end() == 143
    record = place.record()
    assert (record["outcome"], record["exit_code"]) == ("interrupted", 143)  # the launcher's own words
    for name in ("mine", "runs/mine", "runs/mine/run.json"):
        again = stop(tmp_path, name).ok()
        assert again.err == "mine has ended already: interrupted; nothing of it is left\n"


def test_another_run_goes_on(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--name", "other", "train.py") as other:
        other.wait_for("up0")
        (tmp_path / "up0").unlink()
        with place.started("--name", "mine", "train.py") as run:
            run.wait_for("up0")
            stop(tmp_path, "mine").ok()
            run.end()
        assert len(psutil.Process(other.process.pid).children(recursive=True)) == 2
        assert other.process.poll() is None


def test_ranks_that_do_not_leave_are_killed(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--nproc", 2, "--name", "mine", "train.py", "deaf") as run:
        run.wait_for("up0", "up1")
        result = stop(tmp_path, "mine", "--grace", 0.5).ok()
        assert 0.5 < result.seconds < 5
        assert run.end() == 143
    assert place.record()["exit_codes"] == {"0": 137, "1": 137}


def test_a_launcher_that_was_stopped_by_ctrl_z(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--name", "mine", "train.py") as run:
        run.wait_for("up0")
        os.kill(run.process.pid, signal.SIGSTOP)
        assert stop(tmp_path, "mine").ok().seconds < 5
        assert run.end() == 143


def test_a_launcher_that_does_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked twice, then killed."""
    monkeypatch.setattr(ending, "_LAUNCHER_S", 0.3)
    deaf = left_behind("", "deaf")
    record = {"pid": deaf.pid, "launcher": {**launcher.this_launcher(), "since": launcher.started(deaf.pid)}}
    done = ending.end_here("mine-1", record, 0)
    assert deaf.wait(5) == -signal.SIGKILL
    assert (done.launcher, done.told, done.left) == (deaf.pid, (), ())


@pytest.mark.parametrize("kind", ["good", "deaf"])
def test_a_run_that_has_lost_its_launcher(tmp_path: Path, kind: str) -> None:
    job = f"mine-{os.getpid()}-{kind}"
    here = launcher.this_launcher()
    folder = write_record(tmp_path / "runs" / "mine", job=job, hosts=[here["host"]], launcher=here, via="local", pid=1)
    one, other = left_behind(job, kind), left_behind(f"{job}-other")
    os.kill(one.pid, signal.SIGSTOP)  # one that was stopped takes SIGTERM only when it goes on
    try:
        result = stop(tmp_path, "mine", "--grace", 0.4).ok()
        assert one.wait(1) == (-signal.SIGTERM if kind == "good" else -signal.SIGKILL)
        assert other.poll() is None
        assert f"(pid {one.pid})" in result.err
        assert "run.json says interrupted now" in result.err
    finally:
        for process in (one, other):
            process.kill()
            process.wait()
    record = json.loads((folder / "run.json").read_text())
    assert (record["outcome"], record["exit_code"], record["job"]) == ("interrupted", 143, job)
    assert record["seconds"] > 0


def test_an_ended_run_that_has_left_something_behind(tmp_path: Path) -> None:
    job = f"mine-{os.getpid()}"
    write_record(tmp_path / "runs" / "mine", job=job, hosts=[], launcher=launcher.this_launcher(), outcome="failed")
    one = left_behind(job)
    result = stop(tmp_path, "mine").ok()
    assert one.wait(1) == -signal.SIGTERM
    assert f"(pid {one.pid})" in result.err
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["outcome"] == "failed"


def test_a_run_whose_folder_is_gone(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--name", "mine", "train.py") as run:
        run.wait_for("up0")
        shutil.rmtree(tmp_path / "runs")
        result = stop(tmp_path, "mine").ok()
        assert "ended on this machine: " in result.err
        run.end()


def test_by_its_name_from_elsewhere(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    with place.started("--name", "mine-of-many", "train.py") as run:
        run.wait_for("up0")
        stop(tmp_path / "elsewhere", "mine-of-many").ok()
        assert run.end() == 143


def test_on_all_machines(machines: Machines, tmp_path: Path) -> None:
    config = str(machines.inventory.parent / "ssh_config")
    folder = write_record(tmp_path / "runs" / "far", job="far-77", ssh_config=config, launcher=None)
    with (
        machines.process(0, "far-77") as one,
        machines.process(1, "far-77") as two,
        machines.process(1, "x-1") as other,
    ):
        time.sleep(0.2)
        preview = machines.head.run([INSTEP, "stop", "far", "--dry-run"], cwd=tmp_path).ok().out
        assert "n1: sleep 60 (pid " in preview
        assert "n2: sleep 60 (pid " in preview
        result = machines.head.run([INSTEP, "stop", "far"], cwd=tmp_path).ok()  # ssh_config is in run.json
        assert (one.wait(2), two.wait(2)) != (0, 0)
        assert other.poll() is None
        assert "■ nothing is left of far on 3 machines · " in result.err
    assert json.loads((folder / "run.json").read_text())["outcome"] == "interrupted"


def test_a_machine_that_does_not_answer(machines: Machines, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "far", job="far-78", launcher=None, hosts=["n1", "gone.invalid"])
    with machines.process(0, "far-78") as one:
        result = machines.instep("stop", "far", cwd=tmp_path)
        one.wait(2)
    assert result.rc == 1
    assert "✗ gone.invalid did not answer, so what is left there is not known: " in result.err
    assert json.loads((folder / "run.json").read_text())["outcome"] == "running"  # for all that is known


def test_a_launcher_on_another_machine(machines: Machines, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    argv = machines.nodes[0].argv([INSTEP, "run", "--nproc", "2", "--name", "mine", "train.py"], cwd=tmp_path)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        result = machines.instep("stop", "mine", cwd=tmp_path).ok()
        assert run.wait(5) == 143
    assert "asking its launcher on n1" in result.err
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["outcome"] == "interrupted"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["min"], "did you mean:  instep stop mine-2"),
        (["nime-2"], "did you mean:  instep stop mine-2"),
        (["zzz"], "the last run is:  instep stop mine-2"),
        ([""], "no such run: ''"),
        ([" "], "no such run: ' '"),
        (["."], "there is no run.json in it"),
        (["empty"], "there is no run.json in it"),
        (["train.py"], "is a file, and no run"),
        (["broken"], "is not what instep writes"),
        (["list"], "it holds a list"),
        (["mine-2", "--grace", "-1"], "--grace -1 is no time"),
        (["mine-2", "--grace", "inf"], "--grace inf is no time"),
        (["mine-2", "--hosts", "a,a"], "twice"),
        (["mine-2", "--runs", "nowhere"], "nowhere"),
        (["x" * 5000], "no such run"),
        ([], "RUN"),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], says: str) -> None:
    write_record(tmp_path / "runs" / "mine-2", outcome="finished", hosts=[])
    for name, text in (("broken", "{"), ("list", "[]")):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "train.py").touch()
    os.utime(tmp_path / "runs" / "mine-2")
    result = stop(tmp_path, *words)
    assert result.rc == 2, result
    assert says in result.err, result.err
    assert "Traceback" not in result.err
