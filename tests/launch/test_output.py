"""Logs and screen."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.launch.jobs import INSTEP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.launch.jobs import Place

SPEAK = """
    import os, sys
    rank = os.environ["RANK"]
    print(f"out {rank}")
    print(f"err {rank}", file=sys.stderr)
"""


def test_the_main_rank_is_shown_and_all_are_logged(place: Place) -> None:
    place.write("train.py", SPEAK)
    result = place.run("--nproc", 3, "train.py").ok()
    assert result.out == "out 0\n"
    assert "err 0\n" in result.err
    assert "err 1" not in result.err
    for rank in range(3):
        assert sorted(place.log(rank).splitlines()) == [f"err {rank}", f"out {rank}"]


def test_all_are_shown_with_their_rank(place: Place) -> None:
    place.write("train.py", SPEAK)
    result = place.run("--nproc", 3, "--show", "all", "train.py").ok()
    assert sorted(result.out.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    for rank in range(3):
        assert f"[rank {rank}] err {rank}\n" in result.err


def test_lines_stay_whole(place: Place) -> None:
    place.write(
        "train.py",
        """
        import os, sys, time
        for part in ("one ", "two ", "three\\n", "10%\\r50%\\r100%\\n", "no end"):
            os.write(1, part.encode())
            time.sleep(0.05)
        """,
    )
    result = place.run("--nproc", 2, "--show", "all", "train.py").ok()
    wanted = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("100%", "no end", "one two three")]
    assert sorted(result.out.splitlines()) == wanted
    assert place.log(1) == "one two three\n10%\n50%\n100%\nno end"  # read_text turns \\r into \\n


def test_everything_arrives(place: Place) -> None:
    place.write("train.py", "import os\nfor n in range(200): os.write(1, bytes([65 + n % 26]) * 9999 + b'\\n')\n")
    result = place.run("--nproc", 2, "train.py").ok()
    assert len(result.out) == 200 * 10_000
    assert place.log(0) == place.log(1) == result.out


def test_lines_come_when_they_are_printed(place: Place) -> None:
    place.write("train.py", "import time\nprint('now')\ntime.sleep(600)\n")
    with place.started("train.py") as run:
        deadline = time.monotonic() + 10
        while run.out != "now\n":
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_one_who_holds_the_pipe_does_not_keep_us(place: Place) -> None:
    place.write("train.py", "import subprocess\nprint('x')\nsubprocess.Popen(['sleep', '300'])\n")
    result = place.run("train.py", limit_s=15).ok()
    assert result.out == "x\n"
    assert "ended one process that the ranks left behind: sleep 300" in result.err


def test_a_reader_that_has_gone(place: Place) -> None:
    place.write("train.py", "for n in range(100000): print(n)\n")
    done = subprocess.run(
        f"{INSTEP} run train.py | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=place.path, env={**os.environ, **place.env}, capture_output=True,
        text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "0\n0\n"
    assert place.log(0).endswith("99999\n")


def test_streams_that_the_caller_has_closed(place: Place) -> None:
    place.write("train.py", SPEAK)
    done = subprocess.run(
        f"{INSTEP} run --nproc 2 train.py <&- >&-",
        shell=True, cwd=place.path, env={**os.environ, **place.env}, stderr=subprocess.PIPE, text=True, timeout=30,
        check=True,
    )  # fmt: skip
    assert "✓ finished" in done.stderr
    assert sorted(place.log(0).splitlines()) == ["err 0", "out 0"]


def test_json_has_the_standard_output_to_itself(place: Place) -> None:
    place.write("train.py", SPEAK)
    result = place.run("--nproc", 2, "--json", "train.py", "--lr", 1).ok()
    told = json.loads(result.out)
    assert told == {**place.record(), "folder": str(place.runs[0])}
    assert told["arguments"] == ["--lr", "1"]
    assert "out 0\n" in result.err


def test_json_of_an_error(place: Place) -> None:
    result = place.run("--json", "missing.py")
    assert result.rc == 2
    assert json.loads(result.out)["error"]["what"] == "no such script: missing.py"


def test_a_terminal_stays_one_for_the_main_rank(place: Place) -> None:
    place.write(
        "train.py",
        """
        import os, sys
        print([os.isatty(fd) for fd in (0, 1, 2)], os.isatty(1) and os.get_terminal_size(1).columns)
        """,
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    process = subprocess.Popen(
        [INSTEP, "run", "--nproc", "2", "train.py"],
        stdin=slave, stdout=slave, stderr=slave, cwd=place.path, env={**os.environ, **place.env, "TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    text = b""
    try:
        while chunk := os.read(master, 4096):
            text += chunk
    except OSError:  # EIO: the end
        pass
    assert process.wait(20) == 0
    assert b"[False, True, True] 123\r\n" in text
    assert b"\x1b[32m\xe2\x9c\x93 finished\x1b[0m" in text  # coloured
    assert place.log(0) == "[False, True, True] 123\n"
    assert place.log(1) == "[False, False, False] False\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system: needs root")
    return folder


def test_a_full_disk(place: Place, small_disk: Path) -> None:
    place.write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            while True:
                print("x" * 1000)
        time.sleep(600)
        """,
    )
    try:
        result = place.run("--nproc", 3, "--runs", small_disk, "train.py", limit_s=20)
        (folder,) = small_disk.iterdir()
        record = json.loads((folder / "run.json").read_text())
    finally:
        subprocess.run(["umount", small_disk], check=True)
    assert result.rc == 2, str(result)
    assert result.err.count("✗") == 1
    assert "✗ the run folder cannot be written; all ranks were ended" in result.err
    assert f"{folder}/log/rank-1.txt: No space left on device" in result.err
    assert f"file system {small_disk}: 0 bytes free" in result.err
    assert "Traceback" not in result.err
    assert record["outcome"] in {"failed", "running"}  # there may be no room to say more


def test_a_read_only_runs_folder(place: Place, small_disk: Path) -> None:
    place.write("train.py", "print('never')\n")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        result = place.run("--runs", small_disk, "train.py")
    finally:
        subprocess.run(["umount", small_disk], check=True)
    assert (result.rc, result.out) == (2, "")
    assert f"✗ the runs folder {small_disk} cannot be written\n  Read-only file system" in result.err
    assert "→ choose another one with --runs DIR" in result.err
