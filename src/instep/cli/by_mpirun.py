"""``instep run --via mpirun``, and what it has in common with ``--via slurm`` inside an allocation."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.machines import read_nodes
from instep.errors import RunError

if TYPE_CHECKING:
    from instep.cli.machines import Named
    from instep.launch.planning.plan import Request
    from instep.world.hosts import HostList


def check(via: str, *, max_restarts: int, program: str) -> None:
    """See that what is asked for can be had by this way.

    Raises:
        RunError: it cannot.

    """
    if program and via != "mpirun":
        raise RunError(f"--mpirun {program} is for --via mpirun", cure="leave it out, or say --via mpirun as well")
    if max_restarts > 0 and via in {"mpirun", "slurm"}:
        other = "let Slurm start the job again: exit with code 75 once the state is saved" if via == "slurm" else ""
        raise RunError(
            f"--max-restarts {max_restarts} is for ranks that instep starts itself",
            evidence=[f"here {'srun' if via == 'slurm' else 'mpirun'} starts them"],
            cure=other or "have them started over ssh:  --via ssh",
        )


def start(
    request: Request, named: Named, listed: HostList, *, runs: Path, name: str | None, program: str, as_json: bool
) -> int:
    """Have mpirun start the ranks; the exit code."""
    from instep.launch.agents.ssh import given_variables
    from instep.launch.tasks.run import Wish
    from instep.launch.tasks.starters import run_by_mpirun

    nodes = read_nodes(named.nodes)
    if nodes is not None:
        if nodes[0] > len(listed.hosts):
            raise RunError(
                f"--nodes asks for {nodes[0]} machines at least, and {len(listed.hosts)} are listed",
                evidence=[", ".join(host.name for host in listed.hosts)],
                cure="list more machines, or ask for fewer",
            )
        listed = replace(listed, hosts=listed.hosts[: nodes[1]])
    if named.sync and (code := copy_there(listed, runs)):
        return code
    wish = Wish(
        runs=runs,
        name=name,
        command=("instep", *sys.argv[1:]),
        stdout=2 if as_json else 1,
        own_copies=named.own_copies,
        copied=named.sync,
        variables=given_variables(os.environ, named.env),
        hints={host.name: host.address for host in listed.hosts if host.address},
        python=named.python,
    )
    result = run_by_mpirun(request, listed, wish, program=program)
    if as_json:
        print(json.dumps(result, indent=2), flush=True)
    return int(result["exit_code"])


def copy_there(listed: HostList, runs: Path) -> int:
    """``--sync``: copy the working folder to those that are not this machine; an exit code if a signal came, else 0."""
    from instep.launch.agents import ssh
    from instep.launch.preflight import sync
    from instep.launch.ranks.signals import ENDING, Signals
    from instep.launch.tasks.command import StoppedError

    others = [host.name for host in listed.hosts if not ssh.is_here(host)]
    with Signals() as signals:

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            if ending := [number for number in signals.take() if number in ENDING]:
                raise StoppedError(ending[0])

        if not others:
            return 0
        way = ssh.Way(listed.ssh_config)
        try:
            copied = sync.copy(Path.cwd(), others, ssh=way.options(), runs=runs, pause=pause, say=_say)
        except StoppedError as stopped:
            return 128 + stopped.number
    _say(*sync.lines(copied))
    return 0


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
