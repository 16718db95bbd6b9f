"""Ctrl-C, SIGTERM, a killed launcher, a killed fork server: no process is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.commands import MARKER

if TYPE_CHECKING:
    from tests.launch.jobs import Place

# Says that it is there, and leaves by itself on SIGTERM if told to.
WAIT = """
    import os, signal, sys, time
    from pathlib import Path
    rank = os.environ["RANK"]
    {first}
    Path("ready" + rank).touch()
    time.sleep(600)
"""


def _gone(job: str) -> bool:
    """Whether no process carries the run's own marker, after a moment."""
    for _ in range(100):
        found = []
        for process in psutil.process_iter():
            try:
                if f"INSTEP_JOB={job}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
            except OSError:
                continue
        if not found:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_asked_to_end(place: Place, number: int, code: int) -> None:
    place.write("train.py", WAIT.format(first=""))
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        job = place.record()["job"]
        run.signal(number)
        assert run.end() == code
        assert _gone(job)
        assert "■ interrupted" in run.err
    record = place.record()
    assert (record["outcome"], record["exit_code"], record["first_failure"]) == ("interrupted", code, None)
    assert set(record["exit_codes"].values()) == {code}


def test_ranks_may_save_and_ask_to_be_started_again(place: Place) -> None:
    place.write("train.py", WAIT.format(first="signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"))
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        run.signal(signal.SIGTERM)
        assert run.end() == 75
        assert "↻ preempted; saved: start it again" in run.err
    assert place.record()["outcome"] == "preempted"


def test_a_signal_to_all_processes_of_the_job(place: Place) -> None:
    """As scancel and `pkill -f train.py` do it: the fork server stays until its ranks have saved."""
    place.write(
        "train.py", WAIT.format(first="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))")
    )
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        for process in [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]:
            process.send_signal(signal.SIGTERM)
        assert run.end() == 75
    assert place.record()["exit_codes"] == {"0": 75, "1": 75}


def test_the_grace_is_kept_then_all_are_killed(place: Place) -> None:
    place.write("train.py", WAIT.format(first="signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    with place.started("--nproc", 2, "--grace", 1, "train.py") as run:
        run.wait_for("ready0", "ready1")
        began = time.monotonic()
        run.signal(signal.SIGTERM)
        assert run.end() == 143
        assert 0.9 < time.monotonic() - began < 4
    assert set(place.record()["exit_codes"].values()) == {137}


def test_a_second_signal_kills_at_once(place: Place) -> None:
    place.write("train.py", WAIT.format(first="signal.signal(signal.SIGINT, signal.SIG_IGN)"))
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        run.signal(signal.SIGINT)
        time.sleep(0.5)
        assert run.process.poll() is None
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.end() == 130
        assert time.monotonic() - began < 3


def test_a_signal_that_comes_twice_at_once_counts_once(place: Place) -> None:
    """`timeout` sends it to its child and then to the group."""
    place.write(
        "train.py", WAIT.format(first="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(75)))")
    )
    with place.started("train.py") as run:
        run.wait_for("ready0")
        run.signal(signal.SIGTERM)
        time.sleep(0.05)
        run.signal(signal.SIGTERM)
        assert run.end() == 75


def test_a_signal_during_the_import_of_torch(torch_place: Place) -> None:
    torch_place.write("train.py", "raise SystemExit(9)\n")
    with torch_place.started("--nproc", 2, "train.py") as run:
        while not torch_place.runs or not (torch_place.runs[0] / "run.json").exists():
            assert run.process.poll() is None, run.err
            time.sleep(0.01)
        time.sleep(0.1)
        run.signal(signal.SIGINT)
        assert run.end() == 130
    assert torch_place.record()["outcome"] == "interrupted"


def test_usr_signals_are_only_passed_on(place: Place) -> None:
    place.write(
        "train.py",
        """
        import os, signal, time
        from pathlib import Path
        got = []
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
        Path("ready" + os.environ["RANK"]).touch()
        while len(got) < 2:
            time.sleep(0.02)  # pause() would wait for ever if the second one came just before it
        print(sorted(got))
        """,
    )
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        run.signal(signal.SIGUSR1)
        run.signal(signal.SIGUSR2)
        assert run.end() == 0
    assert place.log(0) == place.log(1) == "['SIGUSR1', 'SIGUSR2']\n"


def test_what_the_caller_ignores_stays_ignored(place: Place) -> None:
    """As under nohup: the end of the terminal does not end the run."""
    place.write("train.py", WAIT.format(first="").replace("time.sleep(600)", "time.sleep(1)"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with place.started("train.py") as run:
            run.wait_for("ready0")
            run.signal(signal.SIGHUP)
            assert run.end() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# A daemon that has left its session and its parent, and a child that ignores SIGTERM.
DAEMONS = """
    import os, subprocess
    if os.environ["RANK"] == "0":
        subprocess.run("nohup setsid sleep 300 >/dev/null 2>&1 & echo $! > daemon", shell=True)
        subprocess.run("trap '' TERM; (while :; do sleep 0.1; done) & echo $! > stubborn", shell=True)
"""


def _left(place: Place) -> list[str]:
    return [name for name in ("daemon", "stubborn") if _lives(int((place.path / name).read_text()))]


def _lives(pid: int) -> bool:
    for _ in range(60):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_killed_without_a_chance(place: Place, victim: str) -> None:
    place.write("train.py", WAIT.format(first="exec(Path('daemons.py').read_text())"))
    place.write("daemons.py", DAEMONS)
    with place.started("--nproc", 2, "train.py") as run:
        run.wait_for("ready0", "ready1")
        job = place.record()["job"]
        os.kill(run.process.pid if victim == "launcher" else run.server.pid, signal.SIGKILL)
        assert run.end() == (-9 if victim == "launcher" else 137)
        assert _gone(job)
        assert _left(place) == []
        if victim == "server":
            assert "the parent of all ranks, was killed by signal 9 (SIGKILL)" in run.err
            assert place.record()["outcome"] == "failed"


def test_the_launcher_is_killed_during_the_import_of_torch(torch_place: Place) -> None:
    torch_place.write("train.py", "import time; time.sleep(600)\n")
    with torch_place.started("--nproc", 2, "train.py") as run:
        while not torch_place.runs:
            assert run.process.poll() is None, run.err
            time.sleep(0.01)
        time.sleep(0.3)
        run.signal(signal.SIGKILL)
        run.end()
        deadline = time.monotonic() + 15
        while any(process.info["environ"] and process.info["environ"].get(MARKER) == run.job
                  for process in psutil.process_iter(["environ"])):  # fmt: skip
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_daemons_are_ended_and_named(place: Place) -> None:
    place.write("train.py", DAEMONS)
    result = place.run("--nproc", 2, "train.py").ok()
    assert "that the ranks left behind: " in result.err
    assert "sleep 300" in result.err
    assert _left(place) == []


def test_daemons_of_a_failed_rank(place: Place) -> None:
    place.write("train.py", DAEMONS + "    raise ValueError('x')\n")
    result = place.run("--nproc", 2, "train.py")
    assert result.rc == 1
    assert _left(place) == []
