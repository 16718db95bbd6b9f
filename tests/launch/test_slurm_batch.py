"""The batch file: its text, what the user's own options change in it, and what is refused before Slurm is asked."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep.errors import RunError
from instep.launch.planning.machine import Machine
from instep.launch.planning.plan import Request, Site, make_plan
from instep.launch.planning.target import Target
from instep.launch.slurm import batch
from instep.launch.slurm.batch import Batch

GOLDEN = Path(__file__).with_name("golden")
TRAIN = Target("script", "train.py", ("--lr", "3e-4"))
PLAIN = Batch(TRAIN, "/opt/py/bin/python", "/home/me/work", folder="/home/me/work/runs/first", name="first")
FULL = Batch(
    target=Target("module", "lab.train", ("a b", "$HOME")),
    python="/opt/my python/bin/python",
    cwd="/home/me/work",
    folder='/home/me/50% of "it"/runs/second',
    name="second",
    nodes="2-4",
    nproc="8",
    device="cuda",
    hosts=("n1", "n2"),
    options=("--partition=train", "--time 1:00:00", "--array=1-3"),
    words=(("--show", "all"), ("--env", "WANDB_KEY")),
    before=300,
    max_requeues=7,
)


@pytest.mark.parametrize(("name", "given"), [("plain", PLAIN), ("full", FULL)])
def test_the_text(name: str, given: Batch) -> None:
    file = GOLDEN / f"{name}.sbatch"
    text = batch.render(given)
    if os.environ.get("INSTEP_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_a_file_to_be_submitted_by_hand_names_its_folder_by_the_job() -> None:
    machine = Machine("n", 8, 0, (20000, 21000), (32768, 60999))
    request = Request(TRAIN, nproc="2")
    sites = [Site(host, replace(machine, host=host), 2, address) for host, address in (("h1", "10.0.0.1"), ("h2", ""))]
    plan = make_plan(request, sites, {})
    text = batch.render(batch.of_plan(plan, python="/py", cwd="/w", runs="my runs"))
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert "#SBATCH --output=train-%j.txt\n" in text
    assert "--continue-run 'my runs'/train-\"$SLURM_JOB_ID\"" in text


@pytest.mark.parametrize("given", [PLAIN, FULL], ids=["plain", "full"])
def test_bash_reads_what_was_meant(given: Batch, tmp_path: Path) -> None:
    text = batch.render(given).replace('exec "${command[@]}"', 'printf "%s\\n" "${command[@]}"')
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True, timeout=20, cwd=tmp_path)
    words = done.stdout.splitlines()
    assert words[:3] == [given.python, "-m", "instep"]
    assert words[words.index("--continue-run") + 1] == given.folder
    assert tuple(words[-len(given.target.words) :]) == given.target.words


def directives(**changes: Any) -> list[str]:
    return batch.directives_of(batch.render(replace(PLAIN, **changes)))


@pytest.mark.parametrize(
    ("changes", "there", "gone"),
    [
        ({}, "--ntasks-per-node=1", "--gpus"),
        ({"nproc": "3"}, "--ntasks-per-node=3", "--gpus"),
        ({"nproc": "3", "device": "cuda"}, "--gpus-per-node=3", "--nodelist"),
        ({"nproc": "3", "device": "cuda", "options": ("--gres=gpu:3",)}, "--gres=gpu:3", "--gpus-per-node"),
        ({"options": ("--gpus-per-node=4",)}, "--ntasks-per-node=4", "--gres"),
        ({"options": ("--gpus-per-node=a100:4",)}, "--ntasks-per-node=4", "--gres"),
        ({"options": ("--gres gpu:nvidia-rtx-3090:2,shard:9",)}, "--ntasks-per-node=2", "--gpus"),
        ({"options": ("--gres=gpu:a100:2,gpu:v100:4",)}, "--ntasks-per-node=6", "--gpus"),
        ({"options": ("--gres=gpu",)}, "--ntasks-per-node=1", "--gpus"),
        ({"options": ("--ntasks=5",)}, "--ntasks=5", "--ntasks-per-node"),
        ({"options": ("-n5",)}, "-n5", "--ntasks-per-node"),
        ({"options": ("-N 4",)}, "-N 4", "--nodes"),
        ({"options": ("--job-name=mine",)}, "--job-name=mine", "--job-name=first"),
        ({"options": ("--no-requeue",)}, "--no-requeue", "--requeue"),
        ({"options": ("--signal=B:USR2@60",)}, "--signal=B:USR2@60", "--signal=B:USR1"),
        ({"before": 0}, "--requeue", "--signal"),
        ({"max_requeues": 0}, "--open-mode=append", "--requeue"),
        (
            {"options": ("-a 1-9%2",)},
            "--output=/home/me/work/runs/first/slurm-%a.txt",
            "--output=/home/me/work/runs/first/slurm.txt",
        ),
    ],
)
def test_ours_give_way_to_the_users_own(changes: dict[str, Any], there: str, gone: str) -> None:
    found = directives(**changes)
    assert there in found
    assert not [one for one in found if one.startswith(gone)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": ("partition=train",)}, "no option of sbatch"),
        ({"options": ("--",)}, "no option of sbatch"),
        ({"options": ("",)}, "no option of sbatch"),
        ({"options": ("--time=1\nrm -r x",)}, "no option of sbatch"),
        ({"options": ("-o x.txt",)}, "kept in the run folder"),
        ({"options": ("--error=x",)}, "kept in the run folder"),
        ({"options": ("--wrap=ls",)}, "there is a script already"),
        ({"options": ("--chdir=/tmp",)}, "where instep is started"),
        ({"before": -1}, "--before -1"),
        ({"max_requeues": -1}, "--max-requeues -1"),
        ({"options": ("--time=2",)}, "as soon as it begins"),
        ({"options": ("-t 150:00",), "before": 9000}, "as soon as it begins"),
        ({"nproc": "0"}, "--nproc 0"),
        ({"nproc": "many"}, "--nproc many"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        batch.check(replace(PLAIN, **changes))


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        ("--time=3", 180),
        ("-t3", None),  # sbatch reads it; we need not
        ("--time 3:05", 185),
        ("--time=1:00:10", 3610),
        ("--time=2-12", 216_000),
        ("--time=2-12:30", 217_800),
        ("--time=2-12:30:05", 217_805),
        ("--time=UNLIMITED", None),
        ("--mem=3", None),
    ],
)
def test_time_limits(option: str, seconds: int | None) -> None:
    assert batch.time_limit(replace(PLAIN, options=(option,))) == seconds


def test_the_guilty_line_is_shown_with_its_number() -> None:
    text = batch.render(FULL)
    (line,) = batch.lines_of(text, ["--partition=train"])
    number, _, rest = line.partition(": ")
    assert rest == "#SBATCH --partition=train"
    assert text.splitlines()[int(number.removeprefix("line ")) - 1] == rest
    options = batch.directives_of(text)
    assert batch.named_in("sbatch: error: Invalid --time specification", options) == ["--time 1:00:00"]
    assert batch.named_in("sbatch: error: Invalid --nodes-x specification", options) == []
    assert "--partition=train" not in batch.without(text, "--partition=train")


def test_variables_that_would_overrule_the_file_are_left_out() -> None:
    given = {"SBATCH_OUTPUT": "x", "SBATCH_PARTITION": "mine", "INSTEP_JOB": "outer", "PATH": "/bin"}
    assert batch.cleaned(given) == {"SBATCH_PARTITION": "mine", "PATH": "/bin"}
