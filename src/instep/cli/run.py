"""``instep run``: start a script on several ranks, here or on other machines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.cli import batch, by_mpirun, machines
from instep.errors import InstepError, RunError

if TYPE_CHECKING:
    from instep.launch.agents.several import Wish
    from instep.launch.planning.plan import Plan, Request
    from instep.world.hosts import HostList

USAGE = "[OPTIONS] (SCRIPT | -m MODULE)"
# Options end at SCRIPT: what follows belongs to the script, whatever it looks like.
SETTINGS = {"allow_interspersed_args": False}


def run_command(  # noqa: PLR0917  # typer reads the signature
    ctx: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="SCRIPT or MODULE, and what it is given.", show_default=False),
    ] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", metavar="N|auto", help="Ranks; auto: one per GPU, or one.")
    ] = "auto",
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.", show_default=False)] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run folder, a new one. [default: script and time]")
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are kept.")] = Path("runs"),
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What the ranks compute on.")] = "auto",
    show: Annotated[str, typer.Option(metavar="main|all", help="Whose output comes to the screen.")] = "main",
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to leave after Ctrl-C or SIGTERM, before SIGKILL.")
    ] = 30.0,
    guard: Annotated[
        str, typer.Option(metavar="kill|warn|off", help="Ranks out of step: end the job, only tell, or do not look.")
    ] = "kill",
    no_guard: Annotated[bool, typer.Option("--no-guard", help="The same as --guard off.", show_default=False)] = False,
    guard_suspect: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a suspicion must stand where nothing proves it.")
    ] = 8.0,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Machines and ranks on each: h1:2,h2:2 or n[1-4]:8.", show_default=False),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same from a hostfile: h1 slots=2, one a line.", show_default=False),
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same from an inventory, see docs/hosts.md.", show_default=False),
    ] = None,
    via: Annotated[
        str,
        typer.Option(
            metavar="auto|local|ssh|mpirun|slurm",
            help="What starts the ranks; auto: ssh on named machines, Slurm in its allocations, or nothing else.",
        ),
    ] = "auto",
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX", help="How many machines, at least and at most; others are spare.", show_default=False
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="Start all ranks again after a failure or a lost machine, so often.")
    ] = 0,
    node_wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for machines that are missing.")
    ] = 60.0,
    sync: Annotated[
        bool, typer.Option("--sync", help="Copy this folder to the machines first, by rsync.", show_default=False)
    ] = False,
    own_copies: Annotated[
        bool,
        typer.Option(
            "--own-copies", help="The folder is not shared: each has its copy, all alike.", show_default=False
        ),
    ] = False,
    python: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Python on the machines. [default: the same path as here]", show_default=False
        ),
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="A variable for the ranks; again for more.", show_default=False),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(metavar="rank|node", help="What srun starts: a task for each rank, or an agent for each machine."),
    ] = "rank",
    mpirun: Annotated[
        str,
        typer.Option(
            metavar="PROGRAM", help="Which one, for --via mpirun. [default: the first in PATH]", show_default=False
        ),
    ] = "",
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="An option of sbatch, such as --partition=train.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch a submitted job to its end.")] = False,
    before: Annotated[
        int, typer.Option(metavar="SECONDS", help="When to have a submitted job save, before its time limit.")
    ] = 120,
    max_requeues: Annotated[
        int, typer.Option(metavar="N", help="How often a job that saved (exit code 75) is started again by Slurm.")
    ] = 100,
    continue_run: Annotated[Path | None, typer.Option(hidden=True)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; start nothing.", show_default=False)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object to stdout at the end.", show_default=False),
    ] = False,
) -> None:
    """Start SCRIPT on several ranks, here or on other machines, keep its logs, and end it cleanly.

    Every rank runs SCRIPT as `python SCRIPT ARGS` would, with the variables that torchrun sets. Options come before
    SCRIPT; what follows it is the script's own.
    """
    from instep.launch.planning.plan import Request, Site, make_plan
    from instep.launch.planning.target import find_target

    try:
        _check_choice("--device", device, ("auto", "cpu", "cuda"))
        _check_choice("--show", show, ("main", "all"))
        _check_choice("--guard", guard, ("kill", "warn", "off"))
        _check_choice("--tasks", tasks, ("rank", "node"))
        named = machines.Named(hosts, hostfile, inventory, nodes, node_wait, sync, own_copies, python, tuple(env or ()))
        listed = named.listed(nproc)
        via = machines.choose_way(via, listed, os.environ)
        wanted = batch.Wish(tuple(slurm or ()), follow, before, max_requeues)
        if env and via != "ssh":
            machines.take_variables(named.env, os.environ)
        outside = batch.is_outside(via, os.environ)
        batch.check(wanted, outside=outside)
        by_mpirun.check(via, max_restarts=max_restarts, program=mpirun)
        named.check_copying(via)
        target = find_target(program or [], is_module=module)
        guard = "off" if no_guard else guard
        request = Request(target, nproc, device, show, grace, guard, guard_suspect, max_restarts)
        if via in {"mpirun", "slurm"} and listed is not None and machines.is_elsewhere(listed):
            if sync and not dry_run and (code := by_mpirun.copy_there(listed, runs)):  # the head copies what it has
                raise typer.Exit(code)
            raise typer.Exit(machines.at_head(ctx, named, listed, via))
        if outside:
            job = batch.make_batch(
                ctx, target, wanted, runs=runs, nproc=nproc, device=device, named=named, listed=listed
            )
            raise typer.Exit(batch.submit(job, wanted, runs=runs, name=name, dry_run=dry_run, as_json=as_json))
        if batch.is_inside(via, os.environ) and dry_run:
            lines, values = batch.dry(request, runs=runs, named=named, listed=listed, as_json=as_json)
            _print_json(values) if as_json else print("\n".join(lines))
            raise typer.Exit(0)
        if batch.is_inside(via, os.environ):
            raise typer.Exit(
                batch.start(
                    request,
                    wanted,
                    runs=runs,
                    name=name,
                    named=named,
                    listed=listed,
                    going_on=continue_run,
                    tasks=tasks,
                    as_json=as_json,
                )
            )
        named.check(via, listed)
        if via == "mpirun" and listed is not None and not dry_run:
            raise typer.Exit(
                by_mpirun.start(request, named, listed, runs=runs, name=name, program=mpirun, as_json=as_json)
            )
        if via == "ssh" or (max_restarts and via == "local" and not dry_run) or (dry_run and listed is not None):
            wish = machines.make_wish(named, runs=runs, name=name, as_json=as_json)
            raise typer.Exit(_there(request, listed, wish, via=via, mpirun=mpirun, dry_run=dry_run, as_json=as_json))
        from instep.launch.planning.machine import this_machine

        here = this_machine(os.environ)
        plan = make_plan(request, [Site(here.host, here)], os.environ)
        code = _dry(plan, runs, as_json) if dry_run else _start(plan, runs, name, as_json)
    except InstepError as error:
        if as_json:
            said = {"what": error.what, "evidence": list(error.evidence), "cure": error.cure}
            _print_json({"exit_code": error.exit_code, "error": said})
        raise
    raise typer.Exit(code)


def _start(plan: Plan, runs: Path, name: str | None, as_json: bool) -> int:
    from instep.launch.local import run_here

    command = ["instep", *sys.argv[1:]]
    result = run_here(plan, runs=runs, name=name, command=command, stdout=2 if as_json else 1)
    if as_json:
        _print_json(result)
    return int(result["exit_code"])


def _there(
    request: Request, listed: HostList | None, wish: Wish, *, via: str, mpirun: str, dry_run: bool, as_json: bool
) -> int:
    """Over agents."""
    if dry_run and listed is not None:
        lines, values = machines.dry(request, listed, wish, via=via, mpirun=mpirun)
        _print_json(values) if as_json else print("\n".join(lines))
        return 0
    result = machines.start(request, listed, wish)
    if as_json:
        _print_json(result)
    return int(result["exit_code"])


def _dry(plan: Plan, runs: Path, as_json: bool) -> int:
    from instep.launch.planning import dry

    lines, values = dry.show(plan, runs)
    if as_json:
        _print_json(values)
    else:
        print("\n".join(lines))
    return 0


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2), flush=True)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RunError(f"{option} {value} is not known", cure=f"one of: {', '.join(choices)}")
