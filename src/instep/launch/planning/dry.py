"""``--dry-run``: the plan, and the commands that other launchers would be given for it; nothing is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.planning import render
from instep.launch.tasks import mpi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.launch.planning.plan import Plan


def show(
    plan: Plan,
    runs: Path,
    *,
    via: str = "local",
    port: int = 0,
    least: int = 0,
    head: str = "",
    network: mpi.Network | None = None,
    python: str = sys.executable,
    env: tuple[str, ...] = (),
    srun: Sequence[mpi.Flag] | None = None,
    mpirun: str = "",
) -> tuple[list[str], dict[str, Any]]:
    """The plan for reading, and as plain values.

    Args:
        plan: what would be done.
        runs: the folder of all runs.
        via: what would start the ranks: local, ssh, mpirun or slurm. Its commands come first.
        port: where the ranks would meet; 0 where they are on one machine.
        least: the fewest machines, where they may be fewer than the plan's; else 0.
        head: where mpirun and sbatch would be started; "" is here.
        network: between the machines, as mpirun has to know it.
        python: the interpreter on all machines.
        env: ``--env``.
        srun: inside an allocation: the flags of srun.
        mpirun: whose command is shown; "" is the first that is found.

    Raises:
        RunError: there is no such mpirun.

    """
    setup = render.Setup(
        plan,
        python,
        str(Path.cwd()),
        port,
        os.environ,
        runs=str(runs),
        head=head,
        network=network or mpi.Network(),
        flavours=_flavours(mpirun),
        is_root=os.geteuid() == 0,
        env=env,
        srun=None if srun is None else tuple(srun),
    )
    ways = render.ways(setup, via=via, least=least)
    lines = [*render.plan_lines(plan, runs, port=port), *render.text(ways)]
    return lines, {**plan.as_json(), "port": port, "runs": str(runs.absolute()), "commands": render.as_json(ways)}


def _flavours(wanted: str) -> tuple[mpi.Flavour, ...]:
    """The mpirun of this machine; where there is none, the two that one may meet."""
    try:
        return (mpi.find(wanted),)
    except RunError:
        if wanted:
            raise
        return (mpi.OPENMPI_5, mpi.MPICH_4)
