"""Carry out a batch job on its first machine alone, until the ranks are started by srun."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.launch import kin
from instep.launch.conduct import Conduct
from instep.launch.port import reserve
from instep.launch.server import ForkServer, raise_file_limit
from instep.launch.signals import Signals

if TYPE_CHECKING:
    from instep.launch.plan import Plan


def run_in_allocation(plan: Plan, *, command: list[str], going_on: Path) -> dict[str, Any]:
    """Start the ranks in a run folder that is there."""
    (node,) = plan.nodes
    with Signals() as signals, closing(reserve(plan.ports)) as held:
        port = held.getsockname()[1]
        most_files = raise_file_limit(plan.world_size)
        run = Conduct(plan, runs=Path("runs"), name=None, command=command, port=port, via="slurm", going_on=going_on)
        kin.adopt_orphans()
        environ = {**os.environ, **node.variables, "INSTEP_RUN": str(run.folder), "INSTEP_JOB": run.record.job}
        server = ForkServer(plan.target, host=node.name, environ=environ)
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
        job = run.watch([server], signals)
    return run.conclude(job)
