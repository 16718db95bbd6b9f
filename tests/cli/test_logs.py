"""`instep logs`: what ranks wrote and write, one or all, to the end of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from instep.launch.registry.reading import Reader
from instep.runs import launcher
from tests.cli.machines import INSTEP, write_record
from tests.commands import Result, run_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.launch.jobs import Place

HERE = {"hosts": ["h"], "world_size": 2, "via": "local"}
SCRIPT = """
    import os, sys, time

    for number in range(40):
        print(f"line {number} of {os.environ['RANK']}")
        time.sleep(0.05)
    print("last", end="")
"""


def logs(folder: Path, *words: object, limit_s: float = 20) -> Result:
    return run_command([INSTEP, "logs", *map(str, words)], limit_s=limit_s, cwd=folder)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A run that has ended."""
    folder = write_record(tmp_path / "runs" / "mine", **HERE, outcome="finished", exit_code=0)
    (folder / "log" / "rank-0.txt").write_bytes(b"one\ntwo\nbar 1\rbar 2\nlast")
    (folder / "log" / "rank-1.txt").write_bytes("eins\nzw\xf6lf\n".encode("latin1"))
    return tmp_path


def raw(folder: Path, *words: str) -> bytes:
    return subprocess.run([INSTEP, "logs", *words], cwd=folder, capture_output=True, timeout=20, check=True).stdout


@pytest.mark.parametrize(
    ("words", "out"),
    [
        ([], b"one\ntwo\nbar 1\rbar 2\nlast"),
        (["--rank", "1"], b"eins\nzw\xf6lf\n"),
        (["--tail", "2"], b"bar 1\rbar 2\nlast"),
        (["--tail", "1", "--rank", "1"], b"zw\xf6lf\n"),
        (["--tail", "0"], b""),
        (["--tail", "99", "--follow"], b"one\ntwo\nbar 1\rbar 2\nlast"),
        (["--rank", "all", "--tail", "2"], b"[rank 0] bar 2\n[rank 1] eins\n[rank 1] zw\xf6lf\n[rank 0] last\n"),
    ],
)
def test_what_was_written(ended: Path, words: list[str], out: bytes) -> None:
    assert raw(ended, "mine", *words) == out


def test_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.txt"
    lines = [b"%d %s" % (number, b"x" * (number % 700)) for number in range(5000)]
    for end in (b"", b"\n"):
        log.write_bytes(b"\n".join(lines) + end)
        for wanted in (1, 2, 3, 1000, 4999, 5000, 6000):
            reader = Reader(log, 0, prefixed=False)
            reader.open()
            reader.skip_to_last(wanted)
            found = b"".join(iter(reader.read, b""))
            assert found == b"\n".join(lines[-wanted:]) + end, wanted


def test_a_run_is_followed_to_its_end(place: Place, tmp_path: Path) -> None:
    place.write("train.py", SCRIPT)
    with place.started("--nproc", 2, "--name", "mine", "train.py") as run:
        run.wait_for("runs/mine/run.json")
        one = subprocess.Popen([INSTEP, "logs", "mine", "-f"], cwd=tmp_path, stdout=-1, stderr=-1, text=True)
        both = subprocess.Popen([INSTEP, "logs", "mine", "-f", "--rank", "all"], cwd=tmp_path, stdout=-1, text=True)
        assert one.stdout is not None
        assert one.stdout.readline() == "line 0 of 0\n"
        assert run.process.poll() is None  # it comes while it is written
        assert run.end() == 0
        out, err = one.communicate(timeout=10)
        all_out, _ = both.communicate(timeout=10)
    assert out.splitlines()[-2:] == ["line 39 of 0", "last"]
    assert err == "… mine: finished\n"
    assert (one.returncode, both.returncode) == (0, 0)
    lines = all_out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {text}" for text in [*(f"line {n} of {rank}" for n in range(40)), "last"]]
    assert [line[6] for line in lines] != sorted(line[6] for line in lines)


def test_a_log_that_comes_later_is_emptied_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "mine", **HERE, pid=os.getpid(), launcher=launcher.this_launcher())
    log = folder / "log" / "rank-0.txt"
    with subprocess.Popen([INSTEP, "logs", "mine", "-f"], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as follower:
        assert follower.stdout is not None
        time.sleep(0.5)
        log.write_text("first\n")
        assert follower.stdout.readline() == "first\n"
        with log.open("a") as file:
            file.write("restart 1 of 3\n")
        assert follower.stdout.readline() == "restart 1 of 3\n"
        log.write_text("a\n")
        assert follower.stdout.readline() == "a\n"
        write_record(folder, **HERE, outcome="failed", exit_code=3)
        assert follower.wait(5) == 0
        assert follower.stderr is not None
        assert follower.stderr.read() == "… mine: failed (exit code 3)\n"


def test_a_run_that_has_lost_its_launcher_is_not_followed_for_ever(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "mine", **HERE, pid=1, launcher=launcher.this_launcher())
    (folder / "log" / "rank-0.txt").write_text("first\n")
    result = logs(tmp_path, "mine", "--follow")
    assert (result.rc, result.out) == (1, "first\n")
    assert result.err == "… mine: its launcher has gone, and nobody wrote an end\n"


def test_nothing_was_written_yet(tmp_path: Path) -> None:
    write_record(tmp_path / "runs" / "mine", **HERE)
    result = logs(tmp_path, "mine").ok()
    assert (result.out, result.err) == ("", "… nothing was written yet: there is no log\n")


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "mine", **HERE, pid=os.getpid(), launcher=launcher.this_launcher())
    (folder / "log" / "rank-0.txt").write_text("line\n" * 100_000)
    # With --follow nothing more is written, and still the end of the reader is seen.
    for words in ("", "--follow"):
        command = f"set -o pipefail; {INSTEP} logs mine {words} | head -n 1"
        result = run_command(["bash", "-c", command], cwd=tmp_path, limit_s=10)
        assert (result.rc, result.out, result.err) == (0, "line\n", "")
    (folder / "log" / "rank-0.txt").write_text("line\n")
    result = run_command(["bash", "-c", f"{INSTEP} logs mine -f | head -n 1"], cwd=tmp_path, limit_s=10)
    assert (result.rc, result.out, result.err) == (0, "line\n", "")


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "runs" / "mine", **HERE, pid=os.getpid(), launcher=launcher.this_launcher())
    (folder / "log" / "rank-0.txt").write_text("line\n")
    with subprocess.Popen([INSTEP, "logs", "mine", "-f"], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "line\n"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(5) == 130
        assert follower.stderr is not None
        assert follower.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine", "--rank", "2"], "--rank 2 is no rank of this run"),
        (["mine", "--rank", "-1"], "give 0 to 1, or all"),
        (["mine", "--rank", "one"], "--rank one"),
        (["mine", "--rank", ""], "--rank  is no rank"),
        (["mine", "--rank", "²"], "--rank ²"),
        (["mine", "--tail", "-1"], "--tail -1 is no number"),
        (["mine", "--tail", "all"], "--tail all is no number"),
        (["mine", "--tail", ""], "--tail  is no number"),
        (["min"], "did you mean:  instep logs mine"),
        (["mine", "--runs", "train.py"], "no such run"),
        (["train.py"], "is a file, and no run"),
        (["cut"], "is not what instep writes"),
        (["mine", "other"], "other"),
        ([], "RUN"),
    ],
)
def test_bad_input(ended: Path, words: list[str], says: str) -> None:
    (ended / "train.py").touch()
    (ended / "runs" / "cut").mkdir()
    (ended / "runs" / "cut" / "run.json").write_text('{"name": "cut", "job": 3')
    result = logs(ended, *words)
    assert result.rc == 2, result
    assert says in result.err, result.err
    assert "Traceback" not in result.err


def test_a_log_that_is_a_folder(ended: Path) -> None:
    (ended / "runs" / "mine" / "log" / "rank-0.txt").unlink()
    (ended / "runs" / "mine" / "log" / "rank-0.txt").mkdir()
    result = logs(ended, "mine")
    assert result.rc == 2
    assert "rank-0.txt cannot be read" in result.err
