"""``instep run --via slurm`` outside an allocation: a job for Slurm."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.machines import read_nodes
from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import typer

    from instep.cli.machines import Named
    from instep.launch.planning.plan import Request
    from instep.launch.planning.target import Target
    from instep.launch.slurm.batch import Batch
    from instep.launch.tasks.run import Wish as TaskWish
    from instep.world.hosts import HostList

# Options of `instep run` that are for the one who submits, or that the batch file says in its own way.
_OUTSIDE = {
    *("program", "module", "nproc", "device", "name", "runs", "via", "nodes", "dry_run", "as_json"),
    *("hosts", "hostfile", "inventory", "slurm", "follow", "before", "max_requeues", "continue_run"),
}


@dataclass(frozen=True)
class Wish:
    """What the user wants of Slurm.

    Attributes:
        options: of sbatch.
        follow: whether to watch the job to its end.
        before: seconds before the time limit at which the job is asked to save.
        max_requeues: how often it may be started again.

    """

    options: tuple[str, ...]
    follow: bool
    before: int
    max_requeues: int


def is_outside(via: str, environ: Mapping[str, str]) -> bool:
    """Whether the job is to be submitted: Slurm is wanted, and this is no allocation of its."""
    return via == "slurm" and not environ.get("SLURM_JOB_ID")


def is_inside(via: str, environ: Mapping[str, str]) -> bool:
    """Whether srun starts the ranks: this is an allocation, and no rank of a run in it."""
    from instep.launch.tasks import srun

    return via in {"auto", "slurm"} and srun.is_inside(environ)


def check(wish: Wish, *, outside: bool) -> None:
    """See that what is for sbatch goes there.

    Raises:
        RunError: it does not.

    """
    if not outside and (wish.options or wish.follow):
        option = f"--slurm {wish.options[0]}" if wish.options else "--follow"
        inside = bool(os.environ.get("SLURM_JOB_ID"))
        raise RunError(
            f"{option} is for a job that is submitted",
            evidence=[f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']}: an allocation is there already"] if inside else [],
            cure="leave it out, or ask salloc for it" if inside else "submit one:  instep run --via slurm ...",
        )


def make_batch(
    ctx: typer.Context,
    target: Target,
    wish: Wish,
    *,
    runs: Path,
    nproc: str,
    device: str,
    named: Named,
    listed: HostList | None,
) -> Batch:
    """What Slurm is asked for."""
    from instep.launch.slurm.batch import Batch

    hosts = listed.hosts if listed else ()
    slots = [host.slots for host in hosts if host.slots]
    least, most = read_nodes(named.nodes) or (len(hosts) or 1,) * 2
    is_even = len(set(slots)) == 1 and len(slots) == len(hosts)
    words = _typed(ctx)
    if slots and not is_even:  # Slurm is asked for as many on each; which has how many, srun is told inside
        words.append(("--hosts", ",".join(f"{host.name}:{host.slots}" if host.slots else host.name for host in hosts)))
    return Batch(
        target=target,
        python=named.python or sys.executable,
        cwd=str(Path.cwd()),
        runs=str(runs),
        name=target.stem,
        nodes=str(least) if least == most else f"{least}-{most}",
        nproc=str(max(slots)) if slots else nproc,
        device=device,
        hosts=tuple(host.name for host in hosts[:most]),
        options=wish.options,
        words=tuple(words),
        before=wish.before,
        max_requeues=wish.max_requeues,
    )


def _typed(ctx: typer.Context) -> list[tuple[str, ...]]:
    """The options that were typed and that the run inside is to have as well."""
    found: list[tuple[str, ...]] = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name) if option.name else None
        if option.name in _OUTSIDE or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[option.name or ""]
        if isinstance(value, bool):
            found.append(((option.opts if value else option.secondary_opts)[0],))
        else:
            values = [str(one) for one in (value if isinstance(value, (list, tuple)) else [value])]
            if option.name == "env":  # sbatch passes the values on, which need not stand in the file
                values = [one.partition("=")[0] for one in values]
            found += [(option.opts[0], one) for one in values]
    return found


def submit(batch: Batch, wish: Wish, *, runs: Path, name: str | None, dry_run: bool, as_json: bool) -> int:
    """Submit the job, and watch it where that is wanted; the exit code."""
    from instep.launch.slurm import batch as batches, follow, submit as submitting

    if dry_run:
        batches.check(batch)
        _print_json({"file": batches.render(batch)}) if as_json else print(batches.render(batch), end="")
        return 0
    command = ["instep", *sys.argv[1:]]
    submitted = submitting.submit(batch, runs=runs, name=name, command=command, environ=os.environ, say=_say)
    if wish.follow:
        result = follow.follow(submitted, _say, stdout=2 if as_json else 1)
    else:
        result = submitting.as_json(submitted)
    if as_json:
        _print_json(result)
    return int(result["exit_code"])


def start(
    request: Request,
    wish: Wish,
    *,
    runs: Path,
    name: str | None,
    named: Named,
    listed: HostList | None,
    going_on: Path | None,
    tasks: str,
    as_json: bool,
) -> int:
    """Inside an allocation: start the ranks; the exit code."""
    from instep.launch.slurm.requeue import in_batch
    from instep.launch.tasks.starters import run_in_allocation

    task_wish, most = _inside(named, runs, name, as_json=as_json)
    if going_on is None:
        result = run_in_allocation(request, task_wish, hosts=listed, most_nodes=most, tasks=tasks)
    else:

        def carry_out(folder: Path) -> dict[str, Any]:
            here = replace(task_wish, runs=folder.parent, going_on=folder)
            return run_in_allocation(request, here, hosts=listed, most_nodes=most, tasks=tasks)

        result = in_batch(going_on, most=wish.max_requeues, environ=os.environ, carry_out=carry_out)
    if as_json:
        _print_json(result)
    return int(result["exit_code"])


def dry(
    request: Request, *, runs: Path, named: Named, listed: HostList | None, as_json: bool
) -> tuple[list[str], dict[str, Any]]:
    """Inside an allocation: say what would be done; see :func:`instep.launch.planning.dry.show`."""
    from instep.launch.planning import dry as showing
    from instep.launch.tasks.starters import plan_in_allocation

    task_wish, most = _inside(named, runs, None, as_json=as_json)
    plan, port, flags = plan_in_allocation(request, task_wish, hosts=listed, most_nodes=most)
    python = named.python or sys.executable
    return showing.show(plan, runs, via="slurm", port=port, python=python, env=named.env, srun=flags)


def _inside(named: Named, runs: Path, name: str | None, *, as_json: bool) -> tuple[TaskWish, int | None]:
    """What the tasks are started with, and on how many machines at most."""
    from instep.launch.tasks.run import Wish as TaskWish

    least, most = read_nodes(named.nodes) or (None, None)
    if least is not None and most is not None:
        most = max(least, min(most, int(os.environ.get("SLURM_JOB_NUM_NODES") or most)))
    wish = TaskWish(
        runs=runs,
        name=name,
        command=["instep", *sys.argv[1:]],
        stdout=2 if as_json else 1,
        own_copies=named.own_copies,
        python=named.python,
        variables={word.partition("=")[0]: os.environ[word.partition("=")[0]] for word in named.env},
    )
    return wish, most


def _say(lines: list[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2), flush=True)
