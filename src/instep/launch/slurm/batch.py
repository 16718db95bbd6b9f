"""The batch file that has Slurm start a job: a comment above each line, to be read and learned from. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from instep.launch.planning.plan import Plan
    from instep.launch.planning.target import Target

OUTPUT = "slurm.txt"  # in the run folder: what would be on the screen
OUTPUT_OF_TASK = "slurm-%a.txt"  # of each task of an array
FILE = "job.sbatch"  # in the run folder
LOOKS_EVERY_S = 30  # Slurm, at time limits: by so much earlier its signal may come

# What sbatch's short options mean, as far as it matters here.
_LONG = {
    "-a": "--array",
    "-c": "--cpus-per-task",
    "-D": "--chdir",
    "-e": "--error",
    "-G": "--gpus",
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-o": "--output",
    "-t": "--time",
    "-w": "--nodelist",
    "-W": "--wait",
}
_GPUS = {"--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres"}
_TASKS = {"--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"}
_OURS = {
    "--output": "what instep and the main rank print is kept in the run folder",
    "--error": "what instep and the main rank print is kept in the run folder",
    "--open-mode": "what is printed after a requeue follows what was printed before",
    "--chdir": "the job runs where instep is started",
    "--wrap": "there is a script already",
    "--parsable": "instep reads the number of the job",
    "--test-only": "instep's own --dry-run shows the file",
    "--wait": "--follow waits for the end of the job",
}


@dataclass(frozen=True)
class Batch:
    """What Slurm is asked for.

    Attributes:
        target: the program.
        python: the interpreter, the same path on all machines.
        cwd: where the job runs.
        folder: the run folder; "" for a file that is submitted by hand: then the job makes it.
        runs: the folder of all runs, for the latter.
        name: of the job.
        nodes: how many machines, as sbatch takes it: "2" or "1-4"; "" leaves it to `options`.
        nproc: ranks on each machine; "auto" leaves it to the GPUs or tasks that are asked for in `options`, or 1.
        device: "auto", "cpu" or "cuda".
        hosts: the machines, where the user has named them.
        options: of sbatch, as the user gave them, such as "--partition=train".
        words: further options of ``instep run``, one tuple each.
        before: seconds before the time limit at which the job is asked to save; 0: it is not.
        max_requeues: how often the job may be started again.

    """

    target: Target
    python: str
    cwd: str
    folder: str = ""
    runs: str = "runs"
    name: str = ""
    nodes: str = "1"
    nproc: str = "auto"
    device: str = "auto"
    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    words: tuple[tuple[str, ...], ...] = ()
    before: int = 120
    max_requeues: int = 100

    @property
    def given(self) -> set[str]:
        """The long names of the options that the user gave."""
        return {option_name(one) for one in self.options}

    @property
    def is_array(self) -> bool:
        """Whether it is many jobs of one file."""
        return "--array" in self.given


def of_plan(plan: Plan, *, python: str, cwd: str, runs: str) -> Batch:
    """The file that would start the same ranks on machines of Slurm's choice, to be submitted by hand."""
    counts = {node.place.count for node in plan.nodes}
    is_even = len(counts) == 1
    each = ",".join(f"{node.name}:{node.place.count}" for node in plan.nodes)
    return Batch(
        target=plan.target,
        python=python,
        cwd=cwd,
        runs=runs,
        name=plan.target.stem,
        nodes=str(len(plan.nodes)),
        nproc=str(max(counts)),
        device=plan.device,
        hosts=() if is_even else tuple(node.name for node in plan.nodes),
        words=() if is_even else (("--hosts", each),),
    )


def option_name(option: str) -> str:
    """The long name of an sbatch option: of "-N2", "--nodes 2" and "--nodes=2" the same."""
    name = re.split(r"[\s=]", option, maxsplit=1)[0]
    if name.startswith("--"):
        return name
    return _LONG.get(name[:2], name[:2])


def check(batch: Batch) -> None:
    """See that the file can be written.

    Raises:
        RunError: something does not fit; says what.

    """
    for option in batch.options:
        _check_option(option)
    if batch.before < 0:
        raise RunError(f"--before {batch.before} is no time", cure="give seconds, such as --before 120; 0 for none")
    limit = time_limit(batch)
    if batch.before and limit is not None and limit <= batch.before + LOOKS_EVERY_S:
        raise RunError(
            f"the job would be asked to save as soon as it begins: its time limit is {limit} s",
            evidence=[f"--before {batch.before}, and Slurm looks every {LOOKS_EVERY_S} s"],
            cure=f"give it more time, or less of a warning:  --before {max(0, limit // 2 - LOOKS_EVERY_S)}",
        )
    if batch.max_requeues < 0:
        raise RunError(
            f"--max-requeues {batch.max_requeues} is no number", cure="give 0 or more, such as --max-requeues 100"
        )
    if batch.nproc != "auto" and not (batch.nproc.isdigit() and int(batch.nproc)):
        raise RunError(
            f"--nproc {batch.nproc} is no number of ranks", cure="give 1 or more, or auto (one rank per GPU): --nproc 2"
        )


def _check_option(option: str) -> None:
    name = option_name(option)
    if not re.match(r"--?[A-Za-z]", option) or "\n" in option:
        raise RunError(
            f"--slurm {option!r} is no option of sbatch",
            cure="one option at a time, as sbatch takes it:  --slurm --partition=train --slurm --time=1:00:00",
        )
    if name in _OURS:
        raise RunError(f"--slurm {option}: {_OURS[name]}", cure=f"leave {name} out")


def time_limit(batch: Batch) -> int | None:
    """Seconds, where the user's own options say them: ``90`` minutes, ``1:30:00``, ``2-12`` days and hours."""
    text = next((re.split(r"[\s=]", one, maxsplit=1)[-1] for one in batch.options if option_name(one) == "--time"), "")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:  # minutes, and seconds
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def ranks_per_node(batch: Batch) -> int | None:
    """How many tasks to ask for on each machine; None where the user's own options say it."""
    if batch.nproc != "auto":
        return int(batch.nproc)
    if batch.given & _TASKS:
        return None
    counts = [_gpus_of(one) for one in batch.options if option_name(one) in {"--gpus-per-node", "--gres"}]
    return max([1, *counts])


def _gpus_of(option: str) -> int:
    """GPUs of each machine: of ``--gpus-per-node=a100:4`` and ``--gres=gpu:a100:4,shard:2``."""
    value = re.split(r"[\s=]", option, maxsplit=1)[-1].strip("\"' ")
    is_list = option_name(option) == "--gres"
    parts = [one for one in value.split(",") if not is_list or re.match(r"gpu\b", one)]
    return sum(int(found[1]) if (found := re.search(r"(?:^|:)(\d+)(?:\(|$)", one)) else 1 for one in parts)


def render(batch: Batch) -> str:
    """The text of the file."""
    head = f"# {batch.name or batch.target.stem}: written by instep run --via slurm; a copy is kept by Slurm."
    lines = ["#!/bin/bash", head]
    for why, options in _directives(batch):
        lines += ["", f"# {why}", *(f"#SBATCH {option}" for option in options)]
    return "\n".join([*lines, "", *_body(batch)]) + "\n"


def _directives(batch: Batch) -> list[tuple[str, list[str]]]:
    """Each with the reason for it; ours give way to the user's."""
    tasks = ranks_per_node(batch)
    lines: list[tuple[str, list[str]]] = []

    def add(option: str, why: str, *others: str) -> None:
        if not batch.given & {option_name(option), *others}:
            lines.append((why, [option]))

    add(f"--job-name={quoted(batch.name or batch.target.stem)}", "The name in squeue.")
    if batch.hosts:
        add(f"--nodelist={','.join(batch.hosts)}", "These machines and no others.")
    if batch.nodes:
        add(f"--nodes={batch.nodes}", "How many machines.")
    if tasks is not None:
        add(f"--ntasks-per-node={tasks}", "Ranks on each.", "--ntasks")
        if batch.device == "cuda":
            add(f"--gpus-per-node={tasks}", "A GPU for each rank.", *_GPUS)
    add(f"--output={quoted(_output(batch))}", "What would be on the screen: instep's own lines, and the main rank's.")
    add("--open-mode=append", "When Slurm starts the job again, its output follows what is there.")
    if batch.before:
        why = f"Some {batch.before} s before the time limit: SIGUSR1 to this script, so that all ranks save and leave."
        add(f"--signal=B:USR1@{batch.before}", why)
    if batch.max_requeues:
        add("--requeue", "Slurm may start it again: it goes on in the same run folder.", "--no-requeue")
    if batch.options:
        lines.append(("Asked for with --slurm.", list(batch.options)))
    return lines


def _output(batch: Batch) -> str:
    """Where the job's output goes; % begins what Slurm replaces."""
    if not batch.folder:
        return f"{plain(batch.name)}-%j.txt"
    return f"{batch.folder.replace('%', '%%')}/{OUTPUT_OF_TASK if batch.is_array else OUTPUT}"


def _body(batch: Batch) -> list[str]:
    folder = (
        shlex.quote(batch.folder) if batch.folder else f'{shlex.quote(batch.runs)}/{plain(batch.name)}-"$SLURM_JOB_ID"'
    )
    words = [
        (f"{shlex.quote(batch.python)} -m instep run", ""),
        ("--via slurm", "the ranks are started by srun, as in an allocation of salloc"),
        (f"--continue-run {folder}", "the run folder, which it goes on in when it was started before"),
        (f"--max-requeues {batch.max_requeues}", "at most so often it has Slurm start it again"),
        *((shlex.join(words), "") for words in own_words(batch)),
        (shlex.join(batch.target.words), ""),
    ]
    width = max((len(text) for text, why in words if why and len(text) < 60), default=0)
    return [
        "# Inside the allocation the same command carries the run out.",
        "command=(",
        *(f"  {text.ljust(width)}  # {why}" if why else f"  {text}" for text, why in words),
        ")",
        "# In the place of this shell, so that Slurm's signals reach it.",
        'exec "${command[@]}"',
    ]


def own_words(batch: Batch) -> Iterable[tuple[str, ...]]:
    """Options of the run that is started inside."""
    if batch.nproc != "auto":
        yield ("--nproc", batch.nproc)
    if batch.device != "auto":
        yield ("--device", batch.device)
    yield from batch.words


def plain(name: str) -> str:
    """A name that needs no quotes anywhere."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.") or "run"


def quoted(value: str) -> str:
    """The value of an option as sbatch reads it from a file."""
    if re.fullmatch(r"[\w./:@%+=,\[\]~-]+", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def lines_of(text: str, options: Sequence[str]) -> list[str]:
    """The lines of the file that hold these options, with their numbers."""
    wanted = {f"#SBATCH {option}" for option in options}
    return [f"line {number}: {line}" for number, line in enumerate(text.splitlines(), 1) if line in wanted]


def directives_of(text: str) -> list[str]:
    """All options that the file holds."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def named_in(words: str, options: Iterable[str]) -> list[str]:
    """The options whose name stands in what sbatch has said."""
    return [one for one in options if re.search(rf"(?<![\w-]){re.escape(option_name(one))}(?![\w-])", words)]


def without(text: str, option: str) -> str:
    """The file without this option."""
    return "\n".join(line for line in text.splitlines() if line != f"#SBATCH {option}") + "\n"


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, without what would overrule the file's own lines, or is of a run around this one."""
    overruling = {
        *("SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_OPEN_MODE", "SBATCH_SIGNAL", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"),
        *("SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_WAIT"),
    }
    return {name: value for name, value in environ.items() if name not in overruling and not name.startswith("INSTEP_")}
