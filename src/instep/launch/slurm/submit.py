"""Give the batch file to sbatch, and keep it in the run folder."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.running.telling import near
from instep.launch.slurm import batch as batches
from instep.launch.slurm.state import last_words
from instep.runs import RunRecord, create_folder, default_name
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from instep.launch.slurm.batch import Batch

_LIMIT_S = 120.0  # sbatch itself asks a controller that does not answer for a minute


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has.

    Attributes:
        job: its number.
        folder: the run folder; of an array, the part that is common to the folders of its tasks.
        is_array: whether it is many jobs.

    """

    job: str
    folder: Path
    is_array: bool

    def lines(self, text: str) -> list[str]:
        """What the user is told."""
        name = near(self.folder)
        if self.is_array:
            own = f"each task has a run folder of its own, {name}-TASK, and its output in {name}/slurm-TASK.txt"
            return [text, f"  {own}", f"  stop all: scancel {self.job}   ·   one: scancel {self.job}_TASK"]
        return [
            text,
            f"  watch: instep logs {name} --follow   ·   stop: scancel {self.job}   ·   file: {name}/job.sbatch",
        ]


def submit(
    batch: Batch,
    *,
    runs: Path,
    name: str | None,
    command: list[str],
    environ: Mapping[str, str],
    say: Callable[[list[str]], None],
) -> Submitted:
    """Make the run folder and the file, and submit it.

    Args:
        batch: what Slurm is asked for, without the folder and the name.
        runs: the folder of all runs.
        name: of the run; None for the program's name and the time.
        command: what was typed, for the record.
        environ: what the job starts with.
        say: tells the user lines.

    Raises:
        RunError: there is no Slurm here, or it refuses; nothing is left then.

    """
    need_slurm()
    batches.check(batch)
    folder = create_folder(runs, name, default_name(batch.target.stem, datetime.now()))  # noqa: DTZ005  # local
    batch = replace(batch, folder=str(folder), name=folder.name)
    text = batches.render(batch)
    try:
        write_whole(folder / batches.FILE, text.encode())
        # Written before the job can start, and once more with its number: until then the job waits for it.
        record = _record(batch, folder, command)
        if not batch.is_array:
            record.write(folder)
        job = _sbatch(folder / batches.FILE, text, batch, environ)
        record.slurm_job = job
        if not batch.is_array:
            record.write(folder)
    except (OSError, RunError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"the run folder {folder} cannot be written", evidence=[str(error)]) from error
        raise
    submitted = Submitted(job, folder, batch.is_array)
    say(submitted.lines(f"instep: {_size(batch)} · Slurm job {job} · {near(folder)}"))
    return submitted


def need_slurm() -> None:
    """See that jobs can be submitted from here.

    Raises:
        RunError: there is no sbatch.

    """
    if shutil.which("sbatch") is None:
        raise RunError(
            "--via slurm, but there is no Slurm on this machine",
            evidence=["no sbatch in PATH"],
            cure="type it on the machine from which you submit jobs; or start the ranks without Slurm:  --via ssh",
        )


def _size(batch: Batch) -> str:
    tasks = batches.ranks_per_node(batch)
    machines = f"{batch.nodes or '?'} machine{'' if batch.nodes == '1' else 's'}"
    if tasks is None:
        return machines
    return f"{machines}, {tasks} rank{'s' if tasks > 1 else ''} on each"


def _record(batch: Batch, folder: Path, command: list[str]) -> RunRecord:
    nodes = int(batch.nodes) if batch.nodes.isdigit() else 1
    return RunRecord(
        name=folder.name,
        command=command,
        script=batch.target.name,
        arguments=list(batch.target.arguments),
        cwd=batch.cwd,
        hosts=list(batch.hosts),
        world_size=nodes * (batches.ranks_per_node(batch) or 1),
        device=batch.device,
        threads=0,
        master="",
        job=f"{folder.name}-{secrets.token_hex(6)}",
        pid=0,
        launcher={},
        via="slurm",
    )


def _sbatch(file: Path, text: str, batch: Batch, environ: Mapping[str, str]) -> str:
    """Submit the file; the job's number."""
    done = _call([str(file)], batch, environ)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    words = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    if "establish a configuration source" in done.stderr:
        raise RunError(
            "Slurm's commands are installed on this machine, but it belongs to no cluster",
            evidence=words,
            cure="submit on a machine of the cluster, such as its login node; or name it as the head of an inventory:\n"
            "instep run --via slurm --inventory machines.toml ...",
        )
    options = batches.directives_of(text)
    guilty = batches.named_in(done.stderr, options)
    if not guilty and "fatal" not in done.stderr:
        guilty = [one for one in options if _is_guilty(text, one, batch, environ)]
    lines = [f"job.sbatch, {line}" for line in batches.lines_of(text, guilty)]
    raise RunError(
        "Slurm does not take the job" if done.returncode > 0 else "sbatch was killed",
        evidence=[*words, *lines],
        cure=_cure(batch, guilty),
    )


def _is_guilty(text: str, option: str, batch: Batch, environ: Mapping[str, str]) -> bool:
    """Whether Slurm would take the file without this option."""
    if option not in batch.options and option.partition("=")[0] not in {"--nodes", "--nodelist", "--ntasks-per-node"}:
        return False
    return _call(["--test-only"], batch, environ, stdin=batches.without(text, option)).returncode == 0


def _cure(batch: Batch, guilty: list[str]) -> str:
    theirs = [one for one in guilty if one in batch.options]
    if theirs:
        options = " ".join(f"--slurm {one}" for one in theirs)
        return f"change  {options}   ·   what there is: sinfo   ·   the file: --dry-run"
    return "see what there is:  sinfo   ·   see the file:  instep run --dry-run ..."


def _call(
    words: list[str], batch: Batch, environ: Mapping[str, str], *, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["sbatch", "--parsable", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            cwd=batch.cwd,
            env=batches.cleaned(environ),
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        heard = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise RunError(
            f"sbatch does not come back: {_LIMIT_S:g} s",
            evidence=[last_words(heard)] if heard else [],
            cure="does the controller answer?  scontrol ping",
        ) from error


def as_json(submitted: Submitted) -> dict[str, Any]:
    """What is printed with ``--json`` for a job that is left to itself."""
    return {
        "exit_code": 0,
        "outcome": "running",
        "slurm_job": submitted.job,
        "folder": str(submitted.folder),
        "file": str(submitted.folder / batches.FILE),
    }
