"""--max-restarts on this machine alone: one agent, as a plain child."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from tests.launch.jobs import Place

# Fails in as many rounds as its argument says.
FLAKY = """
    import os, sys, time
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("round", again, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    if os.environ["RANK"] == "1" and again < int(sys.argv[1]):
        raise ValueError(f"flaky {again}")
    time.sleep(600 if again < int(sys.argv[1]) else 0)
"""


def test_started_again_until_it_is_well(place: Place) -> None:
    place.write("train.py", FLAKY)
    result = place.run("--nproc", 2, "--max-restarts", 3, "train.py", 2).ok()
    assert result.out == "round 0 of 3\nround 1 of 3\nround 2 of 3\n"
    assert [result.err.count(f"failed: ValueError: flaky {number}\n") for number in range(3)] == [1, 1, 0]
    assert "↻ restart 1 of 3 in 1 s\n" in result.err
    assert "↻ restart 2 of 3 in 2 s\n" in result.err
    record = place.record()
    assert (record["outcome"], record["restarts"], record["via"], record["first_failure"]) == (
        "finished",
        2,
        "local",
        None,
    )
    assert record["exit_codes"] == {"0": 0, "1": 0}
    lines = place.log(1).splitlines()
    assert [line.partition(": ")[0] for line in lines if line.startswith("---")] == [
        "--- restart 1 of 3", "--- restart 2 of 3",
    ]  # fmt: skip


def test_not_more_often_than_asked(place: Place) -> None:
    place.write("train.py", FLAKY)
    result = place.run("--nproc", 2, "--max-restarts", 1, "train.py", 9)
    assert result.rc == 1
    record = place.record()
    assert (record["outcome"], record["restarts"]) == ("failed", 1)
    assert record["first_failure"]["message"] == "flaky 1"


@pytest.mark.parametrize(("code", "outcome"), [(75, "preempted"), (130, "failed"), (2, "failed")])
def test_what_is_not_started_again(place: Place, code: int, outcome: str) -> None:
    place.write("train.py", f"import os\nprint('once', flush=True)\nos._exit({code})\n")
    result = place.run("--max-restarts", 3, "train.py")
    assert (result.rc, result.out) == (code, "once\n")
    assert place.record()["outcome"] == outcome


@pytest.mark.parametrize("moment", ["running", "paused"])
def test_ctrl_c_is_the_end(place: Place, moment: str) -> None:
    place.write(
        "train.py",
        "import os, sys, time\nopen('ready', 'w')\ntime.sleep(600 if sys.argv[1] == 'running' else 0)\nos._exit(5)\n",
    )
    with place.started("--max-restarts", 9, "train.py", moment) as run:
        run.wait_for("ready")
        while moment == "paused" and "↻ restart 1 of 9" not in run.err:
            time.sleep(0.01)
        run.signal(signal.SIGINT)
        assert run.end() == 130
    assert place.record()["outcome"] == "interrupted"


def test_the_agent_is_killed_and_there_is_another(place: Place) -> None:
    place.write("train.py", """
        import os, time
        again = os.environ["TORCHELASTIC_RESTART_COUNT"]
        open("ready" + again, "w")
        time.sleep(600 if again == "0" else 0)
    """)  # fmt: skip
    with place.started("--max-restarts", 1, "train.py") as run:
        run.wait_for("ready0")
        (agent,) = psutil.Process(run.process.pid).children()
        agent.kill()
        assert run.end() == 0, run.err
        assert "✗ the agent on localhost was killed by signal 9 (SIGKILL)" in run.err
    assert place.record()["restarts"] == 1


@pytest.mark.parametrize("killed", [False, True], ids=["leaves", "is killed"])
def test_nothing_is_left_when_the_launcher(place: Place, killed: bool) -> None:
    place.write("train.py", """
        import os, subprocess, time
        subprocess.run("nohup setsid sleep 7601 >/dev/null 2>&1 &", shell=True)
        open("ready", "w")
        time.sleep(600)
    """)  # fmt: skip
    with place.started("--max-restarts", 1, "train.py") as run:  # fails where anything is left
        run.wait_for("ready")
        run.signal(signal.SIGKILL if killed else signal.SIGTERM)
        assert run.end() == (-9 if killed else 143)


def test_what_is_no_number_of_restarts(place: Place) -> None:
    place.write("train.py", "")
    result = place.run("--max-restarts", -1, "train.py")
    assert (result.rc, place.runs) == (2, [])
    assert "✗ --max-restarts -1 is no number of restarts" in result.err


def test_ctrl_c_after_a_failure_is_the_end_as_well(place: Place) -> None:
    """The user wants no more, though the failure came first."""
    place.write("train.py", """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(5)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready", "w")
        time.sleep(600)
    """)  # fmt: skip
    with place.started("--nproc", 2, "--max-restarts", 9, "train.py") as run:
        run.wait_for("ready")
        while "failed" not in run.err:
            time.sleep(0.01)
        run.signal(signal.SIGINT)
        assert run.end() == 5
        assert "↻" not in run.err
