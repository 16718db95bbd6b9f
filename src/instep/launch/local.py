"""Carry out a plan on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from instep.launch.ranks import kin
from instep.launch.ranks.port import reserve
from instep.launch.ranks.server import ForkServer, raise_file_limit
from instep.launch.ranks.signals import Signals
from instep.launch.running.conduct import Conduct

if TYPE_CHECKING:
    from pathlib import Path

    from instep.launch.planning.plan import Plan
    from instep.launch.running.guarding import Guarding


def run_here(plan: Plan, *, runs: Path, name: str | None, command: list[str], stdout: int = 1) -> dict[str, Any]:
    """Start the ranks, watch them to their end, and keep the record.

    Args:
        plan: what to do.
        runs: the folder of all runs.
        name: of this one; None for the program's name and the time.
        command: what was typed, for the record.
        stdout: the descriptor that takes what ranks print to their standard output.

    Returns:
        what stands in ``run.json``, and the "folder".

    Raises:
        RunError: the run could not be started, or its folder could not be written; nothing is left running.

    """
    open_standard_streams()
    (node,) = plan.nodes
    with Signals() as signals, closing(reserve(plan.ports)) as held, ExitStack() as at_end:
        port = held.getsockname()[1]
        most_files = raise_file_limit(plan.world_size)
        run = Conduct(plan, runs=runs, name=name, command=command, port=port, stdout=stdout)
        kin.adopt_orphans()
        guarding = _guarding(run)
        if guarding:
            at_end.callback(guarding.close)
        server = ForkServer(plan.target, host=node.name, environ=_environ(run, guarding))
        server.start(
            place=node.place,
            port=port,
            marker=run.record.job,
            folder=run.folder,
            outputs=run.output.ends,
            most_files=most_files,
        )
        run.output.close_ends()
        run.say(run.reporter.teller.start(plan, port, run.folder))
        job = run.watch([server], signals, guarding)
    return run.conclude(job)


def _guarding(run: Conduct) -> Guarding | None:
    if run.plan.guard == "off" or run.plan.world_size == 1:
        return None
    teller = run.reporter.teller
    try:
        from instep.launch.running.guarding import Guarding

        return Guarding(run.plan, run.folder, run.output, teller)
    except OSError as error:
        run.say([teller.note(f"the ranks are not watched: no folder for their records ({error})")])
        return None


def _environ(run: Conduct, guarding: Guarding | None) -> dict[str, str]:
    """What the fork server is started with, and the ranks after it."""
    (node,) = run.plan.nodes
    environ = {**os.environ, **node.variables, "INSTEP_RUN": str(run.folder), "INSTEP_JOB": run.record.job}
    environ.pop("INSTEP_GUARD", None)  # of a run that this one is part of
    return environ | ({"INSTEP_GUARD": str(guarding.folder)} if guarding else {})


def open_standard_streams() -> None:
    """Where the caller has closed one (``<&-``), let nothing of ours take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
