"""`instep ps`: runs by their processes, by their record and in Slurm's queue, here and on other machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from instep.launch.registry.known import join
from instep.launch.registry.sightings import Sighting
from instep.runs import launcher
from tests.cli.machines import INSTEP, write_record
from tests.commands import Result, run_command

if TYPE_CHECKING:
    from tests.cli.machines import Machines
    from tests.launch.jobs import Place

SCRIPT = """
    import os, pathlib, time

    pathlib.Path("up" + os.environ["RANK"]).touch()
    time.sleep(60)
"""


def ps(folder: Path, *words: object, limit_s: float = 20) -> Result:
    return run_command([INSTEP, "ps", *map(str, words)], limit_s=limit_s, cwd=folder)


def listed(folder: Path, *words: object) -> list[dict[str, Any]]:
    """All runs, but for those of other tests that may go on at the same time."""
    found = json.loads(ps(folder, "--json", *words).ok().out)["runs"]
    return [run for run in found if str(folder) in run["folder"] or folder.name in run["job"]]


def test_a_run_that_goes_on(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with place.started("--nproc", 2, "--name", "mine", "train.py") as run:
        run.wait_for("up0", "up1")
        (found,) = listed(tmp_path)
        server = run.server
        ranks = [child.pid for child in server.children()]
        assert found["name"] == "mine"
        assert (found["state"], found["ranks"], found["via"]) == ("running", 2, "local")
        assert (found["pid"], found["launcher_host"]) == (run.process.pid, "")
        ((host, pids),) = found["processes"].items()
        assert [host] == found["hosts"]
        assert sorted(pids) == sorted([server.pid, *ranks])
        head, *rows = ps(tmp_path).ok().out.splitlines()
        assert head.split() == ["RUN", "STATE", "RANKS", "HOSTS", "SINCE", "VIA", "PID/JOB", "FOLDER"]
        (row,) = [row for row in rows if row.startswith("mine ")]
        assert f"pid {run.process.pid}" in row
        assert row.endswith(" runs/mine")
        assert "\x1b" not in "".join(rows)
        assert [
            one["folder"] for one in json.loads(ps(elsewhere, "--json").ok().out)["runs"] if one["name"] == "mine"
        ] == [str(tmp_path / "runs" / "mine")]
    assert [one["state"] for one in listed(tmp_path)] == ["lost its launcher"]  # the test kills it


def test_a_launcher_whose_processes_are_all_elsewhere_is_found_by_its_logs(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--name", "mine", "train.py") as run:
        run.wait_for("up0")
        # The ranks alone carry the run's variables; without them the launcher is still found.
        os.kill(run.process.pid, signal.SIGSTOP)
        for child in psutil.Process(run.process.pid).children(recursive=True):
            child.kill()
        (tmp_path / "elsewhere").mkdir()
        deadline = time.monotonic() + 5
        while True:
            found = json.loads(ps(tmp_path / "elsewhere", "--json").ok().out)["runs"]
            (one,) = [one for one in found if one["folder"] == str(tmp_path / "runs" / "mine")]
            if not any(one["processes"].values()):
                break
            assert time.monotonic() < deadline, one
        assert (one["state"], one["pid"]) == ("running", run.process.pid)


def test_a_run_whose_folder_is_gone(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--nproc", 2, "--name", "mine", "train.py") as run:
        run.wait_for("up0", "up1")
        shutil.rmtree(tmp_path / "runs")
        (found,) = listed(tmp_path)
        assert (found["name"], found["ranks"]) == ("mine", 2)
        assert found["state"].startswith("its run.json is gone")
        run.signal(signal.SIGTERM)
        run.end()


def test_the_number_of_a_launcher_is_used_again(tmp_path: Path) -> None:
    mine: dict[str, Any] = {"pid": os.getpid(), "launcher": launcher.this_launcher()}
    write_record(tmp_path / "runs" / "same", **mine)
    write_record(tmp_path / "runs" / "other", **{**mine, "launcher": {**mine["launcher"], "since": 1}})
    write_record(tmp_path / "runs" / "ended", **mine, outcome="finished")
    assert {one["name"]: one["state"] for one in listed(tmp_path)} == {
        "same": "running",
        "other": "lost its launcher",
    }


def test_nothing_goes_on(tmp_path: Path) -> None:
    assert listed(tmp_path) == []
    result = ps(tmp_path, "--runs", "nowhere").ok()
    assert result.out == "" or "RUN" in result.out  # of other tests, perhaps


def test_other_machines(machines: Machines, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "far", launcher={"host": "n1", "machine": "x", "since": 1})
    job = "far-1234"
    with (
        machines.process(0, job, folder=folder),
        machines.process(1, job, folder=folder),
        machines.process(1, "bare-9"),
    ):
        found = json.loads(machines.instep("ps", "--json", cwd=tmp_path).ok().out)
        assert found["unreachable"] == {}
        one, two = sorted(found["runs"], key=lambda run: run["name"])
        assert (two["name"], two["folder"], two["launcher_host"]) == ("far", str(folder), "n1")
        assert {host: len(pids) for host, pids in two["processes"].items()} == {"n1": 1, "n2": 1}
        assert (one["name"], list(one["processes"])) == ("bare", ["n2"])
        with machines.cut(1):
            begin = time.monotonic()
            result = machines.instep("ps", "--timeout", 1.5, cwd=tmp_path)
            assert time.monotonic() - begin < 6
        assert result.rc == 1
        assert "! n2 did not answer: " in result.err
        assert result.out.splitlines()[1].startswith("far  ")


RECORD: dict[str, Any] = {
    "name": "a", "job": "a-1", "hosts": ["n1"], "world_size": 2, "outcome": "running", "start": "2026-01-31T12:00:00+01:00",
    "via": "slurm", "pid": 7, "launcher": {"host": "n1", "machine": "far", "since": 5}, "slurm_job": None,
}  # fmt: skip
SEEN = Sighting("a-1", "n1", "far", "/runs/a", (8, 9), 2, None, 0.0, RECORD)


@pytest.mark.parametrize(
    ("changes", "sightings", "slurm", "state"),
    [
        ({}, [Sighting("a-1", "n1", "far", "/runs/a", (8,), 1, 7, 0.0, RECORD)], None, "running"),
        ({}, [SEEN], None, "lost its launcher; 2 processes left"),
        ({}, [Sighting("a-1", "n2", "further", "/runs/a", (8,), 1, None, 0.0, RECORD)], None, "running"),
        ({}, [], None, "its launcher is on n1: ask with --hosts"),
        ({"launcher": {"machine": launcher.this_machine_id(), "host": "h", "since": 5}}, [], None, "lost its launcher"),
        ({"launcher": None}, [], None, "lost its launcher"),
        ({"slurm_job": "12"}, [], {"12": "pending (Resources)"}, "pending (Resources)"),
        ({"slurm_job": "12"}, [], {"13": "running"}, "Slurm job 12 has gone"),
        ({"slurm_job": "12_1"}, [], {"12_1": "running"}, "running"),
        ({"slurm_job": "12"}, [], None, "Slurm job 12: squeue does not say"),
        ({"outcome": "failed"}, [SEEN], None, "failed; 2 processes left"),
    ],
)  # fmt: skip
def test_states(changes: dict[str, Any], sightings: list[Sighting], slurm: dict[str, str] | None, state: str) -> None:
    (found,) = join(sightings, [(Path("/runs/a"), {**RECORD, **changes})], slurm)
    assert found.state == state


def test_a_machine_that_is_named_twice_is_seen_once() -> None:
    (found,) = join([SEEN, SEEN], [], None)
    assert found.seen == {"n1": (8, 9)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", ""], "names no machine"),
        (["--hosts", "n1,,n2"], "no machine"),
        (["--hosts", "n1,n1"], "twice"),
        (["--hosts", "n1", "--hostfile", "f"], "--hosts and by --hostfile"),
        (["--hostfile", "missing"], "missing"),
        (["--inventory", "bad.toml"], "bad.toml"),
        (["--inventory", "/"], "/"),
        (["--timeout", "0"], "--timeout 0 is no time"),
        (["--timeout", "nan"], "--timeout nan is no time"),
        (["--timeout", "-1", "--json"], "--timeout -1 is no time"),
        (["--timeout", "soon"], "--timeout"),
        (["extra"], "extra"),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "bad.toml").write_text("machines = 3")
    result = ps(tmp_path, *words)
    assert result.rc == 2, result
    assert says in result.err
    assert "Traceback" not in result.err
    if "--json" in words:
        assert says in json.loads(result.out)["error"]["what"]


def test_records_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    for number, text in enumerate(["", "[]", "{}", '{"outcome": "running"}', "\x00", '{"name": 1, "job": 2}']):
        folder = tmp_path / "runs" / f"bad-{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(text)
    write_record(tmp_path / "runs" / "good", start="yesterday")
    assert [one["name"] for one in listed(tmp_path)] == ["good"]


def test_machines_that_answer_badly_are_said(machines: Machines, tmp_path: Path) -> None:
    result = machines.instep("ps", "--python", "/no/python", cwd=tmp_path)
    assert result.rc == 1
    assert result.err.count("/no/python") == 2
    result = machines.instep("ps", "--python", "/bin/true", cwd=tmp_path)
    assert "! n1 did not answer: /bin/true there said nothing (exit code 0)" in result.err
    result = machines.head.run([INSTEP, "ps", "--hosts", "nobody.invalid"], cwd=tmp_path)
    assert result.rc == 1
    assert "! nobody.invalid did not answer: ssh: Could not resolve hostname" in result.err
