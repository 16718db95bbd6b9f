"""`instep run`: usage, mistakes, the dry run. Each mistake is one clear error with exit code 2, and nothing is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_command
from tests.launch.jobs import INSTEP, Place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path, torch=False)
    made.write("train.py", "print('ran')\n")
    made.write("broken.py", "import os\n\ndef f(:\n    pass\n")
    made.write("nul.py", "x = 1\0\n")
    made.write("empty/x.py", "")
    made.write("pkg/__init__.py", "raise SystemExit('imported by the launcher')\n")
    made.write("pkg/bad.py", "x = = 1\n")
    made.write("a-file", "")
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], ["no such script: missing.py", "looked for /", "there are: broken.py, nul.py, train.py"]),
        (["train"], ["no such script: train", "did you mean train.py?"]),
        (["--nproc", "2"], ["no script to run", "instep run --nproc 2 train.py"]),
        (["-m"], ["no module to run"]),
        (["empty"], ["the folder empty cannot be run", "no empty/__main__.py"]),
        (["broken.py"], ["syntax error in broken.py, line 3: ", "  def f(:\n        ^"]),
        (["nul.py"], ["nul.py"]),
        (["-m", "pkg.bad"], ["syntax error in ", "pkg/bad.py, line 1: invalid syntax", "  x = = 1\n      ^"]),
        (["-m", "nowhere.train"], ["no module named nowhere.train"]),
        (["-m", "pkg"], ["no module named pkg.__main__"]),
        (["-m", "no such"], ["no module named no such"]),
        (["--nproc", "0", "train.py"], ["--nproc 0 is no number of ranks", "→ give 1 or more"]),
        (["--nproc", "-3", "train.py"], ["--nproc -3 is no number of ranks"]),
        (["--nproc", "x", "train.py"], ["--nproc x is no number of ranks"]),
        (["--nproc", "1000000", "train.py"], ["--nproc 1000000 is more than", "CPU cores"]),
        (["--device", "cuda", "train.py"], ["has no NVIDIA GPU", "--device cpu"]),
        (["--device", "tpu", "train.py"], ["--device tpu is not known", "auto, cpu, cuda"]),
        (["--show", "some", "train.py"], ["--show some is not known"]),
        (["--grace", "-1", "train.py"], ["--grace -1 is no time to wait"]),
        (["--grace", "x", "train.py"], ["Invalid value for '--grace'"]),
        (["--name", "a/b", "train.py"], ["'a/b' cannot be the name of a run"]),
        (["--name", "", "train.py"], ["'' cannot be the name of a run"]),
        (["--name", "..", "train.py"], ["'..' cannot be the name of a run"]),
        (["--runs", "a-file", "train.py"], ["a-file cannot be written", "--runs DIR"]),
        (["--runs", "/proc/runs", "train.py"], ["/proc/runs cannot be written"]),
        (["--what", "train.py"], ["No such option"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(place: Place, words: list[str], said: list[str]) -> None:
    before = sorted(path.name for path in place.path.iterdir())
    result = place.run(*words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.rc == 2, str(result)
    assert result.out == ""
    for text in said:
        assert text in result.err, str(result)
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 6
    assert sorted(path.name for path in place.path.iterdir()) == before


def test_a_name_that_exists(place: Place) -> None:
    place.run("--name", "first", "train.py").ok()
    record = (place.path / "runs/first/run.json").read_text()
    result = place.run("--name", "first", "train.py")
    assert (result.rc, result.out) == (2, "")
    assert "✗ there is a run named first already" in result.err
    assert "rm -r" in result.err
    assert (place.path / "runs/first/run.json").read_text() == record


def test_a_folder_that_this_user_may_not_write(place: Place) -> None:
    folder = place.path / "locked"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("root may write everywhere: see test_a_read_only_runs_folder")
    result = place.run("--runs", folder, "train.py")
    assert result.rc == 2
    assert "Permission denied" in result.err


def test_more_ranks_than_gpus(place: Place) -> None:
    """What is said on a machine with GPUs can be seen without one only in the plan: see tests/launch/test_plan.py."""
    result = place.run("--nproc", 3, "--device", "cuda", "train.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.rc == 2
    assert "--device cpu" in result.err


def test_what_follows_the_script_is_the_scripts(place: Place) -> None:
    place.write("args.py", "import sys; print(sys.argv[1:])\n")
    words = ["--nproc", "7", "-x", "--help", "--", "-m", "--json"]
    assert place.run("--nproc", 1, "args.py", *words).ok().out == f"{words}\n"
    assert place.run("--", "args.py", *words).ok().out == f"{words}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_dry_run_starts_nothing(place: Place, as_json: bool) -> None:
    words = ["--nproc", 2, "--dry-run", *(["--json"] if as_json else []), "train.py", "--lr", "1"]
    result = place.run(*words, env={"OMP_NUM_THREADS": "4"}).ok()
    assert place.runs == []
    command = "torchrun --standalone --nproc-per-node=2 train.py --lr 1"
    if as_json:
        plan = json.loads(result.out)
        assert command in plan["torchrun"]
        assert [rank["LOCAL_RANK"] for rank in plan["environment"]] == ["0", "1"]
        assert plan["world_size"] == 2
    else:
        for text in (command, "LOCAL_RANK=1", "WORLD_SIZE=2", "OMP_NUM_THREADS=4", "a free one from "):
            assert text in result.out


def test_help_and_version() -> None:
    assert "run" in run_command([INSTEP, "--help"]).ok().out
    assert "SCRIPT" in run_command([INSTEP, "run", "--help"]).ok().out
    assert run_command([INSTEP, "--version"]).ok().out.startswith("instep ")


def test_the_tools_import_little() -> None:
    """So that help comes at once: no torch, no rich, nothing that only one verb needs."""
    code = "import sys, instep.cli; print(sorted({'torch', 'rich', 'psutil', 'numpy', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
