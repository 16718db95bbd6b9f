"""``instep run``: start a script on several ranks of this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.errors import InstepError, RunError

if TYPE_CHECKING:
    from instep.launch.plan import Plan

USAGE = "[OPTIONS] (SCRIPT | -m MODULE)"
# Options end at SCRIPT: what follows belongs to the script, whatever it looks like.
SETTINGS = {"allow_interspersed_args": False}


def run_command(  # noqa: PLR0917  # typer reads the signature
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; start nothing.", show_default=False)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object to stdout at the end.", show_default=False),
    ] = False,
) -> None:
    """Start SCRIPT on several ranks of this machine, keep its logs, and end it cleanly.

    Every rank runs SCRIPT as `python SCRIPT ARGS` would, with the variables that torchrun sets. Options come before
    SCRIPT; what follows it is the script's own.
    """
    from instep.launch.plan import Request, Site, make_plan
    from instep.launch.target import find_target

    try:
        _check_choice("--device", device, ("auto", "cpu", "cuda"))
        _check_choice("--show", show, ("main", "all"))
        _check_choice("--guard", guard, ("kill", "warn", "off"))
        target = find_target(program or [], is_module=module)
        request = Request(target, nproc, device, show, grace, "off" if no_guard else guard, guard_suspect)
        from instep.launch.machine import this_machine

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


def _dry(plan: Plan, runs: Path, as_json: bool) -> int:
    from instep.launch import render

    ways = render.ways(render.Setup(plan, sys.executable, str(Path.cwd()), 0, os.environ))
    if as_json:
        _print_json({**plan.as_json(), "runs": str(runs.absolute()), "commands": render.as_json(ways)})
    else:
        print("\n".join([*render.plan_lines(plan, runs), *render.text(ways)]))
    return 0


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2), flush=True)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RunError(f"{option} {value} is not known", cure=f"one of: {', '.join(choices)}")
