"""The two programs that start tasks, mpirun and srun, each told what it needs to know of this site."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.agents.several import Wish as AgentsWish, run_there
from instep.launch.agents.ssh import Way, explain, is_here
from instep.launch.agents.sweep import Sweep
from instep.launch.preflight.facts import interfaces
from instep.launch.tasks import mpi, srun
from instep.launch.tasks.run import plan_tasks, run_tasks
from instep.launch.tasks.task import VARIABLE
from instep.world.hosts import Host, HostList

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.planning.plan import Plan, Request
    from instep.launch.tasks.run import Wish

_SSH_S = 10.0
_AT_ONCE = 64  # ssh clients
# Needed before Python runs, and so not among what the task is told later.
_EARLY = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONSAFEPATH")


def run_by_mpirun(request: Request, hosts: HostList, wish: Wish, *, program: str = "") -> dict[str, Any]:
    """Have mpirun start the ranks on these machines: see :func:`instep.launch.tasks.run.run_tasks`.

    Args:
        request: what the user wants.
        hosts: the machines.
        wish: the rest.
        program: the mpirun to take; "" takes the first in PATH.

    Raises:
        RunError: there is no usable mpirun, or the run could not be started.

    """
    names = [host.name for host in hosts.hosts]
    mpi.check_names(names)
    flavour = mpi.find(program)
    if flavour.kind == "openmpi" and os.environ.get("SLURM_JOB_ID"):  # srun starts its daemons
        _see_slots(request, hosts)
    else:
        _see_reached(hosts)
    with tempfile.TemporaryDirectory(prefix="instep-") as folder:
        starter = Mpirun(flavour, hosts, Path(folder), python=wish.python or sys.executable)
        try:
            return run_tasks(request, starter, [(host.name, host.slots) for host in hosts.hosts], wish)
        finally:
            for sweep in starter.sweeps:
                sweep.wait()


def _see_slots(request: Request, hosts: HostList) -> None:
    """Whether the allocation has a slot for every rank: Open MPI would start fewer ranks, and say nothing.

    Raises:
        RunError: it has not.

    """
    granted = srun.allocation(os.environ)
    slots = dict(zip(granted.hosts, granted.tasks or (1,) * len(granted.hosts), strict=True))
    counts = {host.name: host.slots or int(request.nproc if request.nproc.isdigit() else 1) for host in hosts.hosts}
    if any(count > slots.get(name, 0) for name, count in counts.items()):
        raise RunError(
            f"job {granted.job} has not enough slots for these ranks",
            evidence=[f"{name}: {count} ranks, {slots.get(name, 0)} slots" for name, count in counts.items()],
            cure=f"ask Slurm for more tasks:  salloc --nodes={len(counts)} --ntasks={sum(counts.values())} ...\n"
            "or let srun start the ranks:  --via slurm",
        )


def _see_reached(hosts: HostList) -> None:
    """Whether ssh reaches all machines without asking anybody: mpirun may wait for ever for one that it does not.

    Raises:
        RunError: it does not.

    """
    way = Way(hosts.ssh_config)
    others = [host for host in hosts.hosts if not is_here(host)]

    def attempt(host: Host) -> RunError | None:
        argv = [*way.options(), "--", host.name, "exit 0"]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=2 * _SSH_S,
                check=False,
                start_new_session=True,  # ssh finds nobody to ask for a password
            )
        except subprocess.TimeoutExpired:
            return explain(host.name, None, [], way)
        except OSError as error:
            return RunError(f"ssh cannot be started: {error.strerror}", cure="sudo apt-get install openssh-client")
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return explain(host.name, done.returncode, words, way) if done.returncode else None

    with ThreadPoolExecutor(min(len(others), _AT_ONCE) or 1) as pool:
        for error in pool.map(attempt, others):
            if error is not None:
                raise error


class Mpirun:
    """Starts tasks by mpirun: see :class:`instep.launch.tasks.run.Starter`."""

    via = "mpirun"
    port_key = ""
    limit_s: float | None = 60.0

    def __init__(self, flavour: mpi.Flavour, hosts: HostList, folder: Path, *, python: str) -> None:
        self.name, self.title = Path(flavour.program).name, flavour.title
        # Those that are named to mpirun first, see _hydra() in mpi.py.
        early = {name: os.environ[name] for name in _EARLY if os.environ.get(name)}
        self.environ: Mapping[str, str] = {**early, **os.environ}
        self._flavour = flavour
        self._network = find_network(hosts, folder)
        self.ssh_config = hosts.ssh_config
        self._way = Way(hosts.ssh_config, python)
        self.sweeps: list[Sweep] = []

    def lost(self, host: str, marker: str) -> None:
        """What mpirun's daemon should have ended there may be left."""
        self.sweeps.append(Sweep(host, marker, self._way, is_here=is_here(Host(host))))

    def argv(self, parts: Sequence[tuple[str, int]], command: Sequence[str]) -> list[str]:
        """The command line."""
        names = [VARIABLE, *(name for name in _EARLY if name in self.environ)]
        given = mpi.flags(
            self._flavour, parts, network=self._network, names=names, is_root=os.geteuid() == 0, only=True
        )
        if self._flavour.kind == "openmpi" and any(is_here(Host(name)) for name, _ in parts[1:]):
            return mpi.argv_in_order(self._flavour, given, parts, command)
        return mpi.argv(self._flavour, given, command)


def find_network(hosts: HostList, folder: Path | None = None) -> mpi.Network:
    """The network between this machine and the others, by the route to the first of them; and how ssh is called.

    Args:
        hosts: the machines.
        folder: where a file may be put that runs ssh with its configuration; None makes none.

    """
    own = {address: (name, prefix) for name, address, prefix in interfaces()}
    subnet = interface = ""
    for host in hosts.hosts:
        address = _address_towards(host.address or _ssh_name(host.name, hosts.ssh_config))
        interface, prefix = own.get(address, ("", None))
        if interface and prefix and not ipaddress.ip_address(address).is_loopback and interface != "lo":
            if ":" not in address:
                subnet = str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))
            break
        interface = ""
    program = None
    if hosts.ssh_config and folder is not None:
        program = folder / "ssh"
        program.write_text(f'#!/bin/sh\nexec ssh -F {shlex.quote(str(hosts.ssh_config))} "$@"\n')
        program.chmod(0o700)
    return mpi.Network(subnet, interface, hosts.ssh_config, program, bool(os.environ.get("SLURM_JOB_ID")))


def _ssh_name(name: str, ssh_config: Path | None) -> str:
    """What ssh would connect to; the name itself where ssh does not say."""
    given = ["-F", str(ssh_config)] if ssh_config else []
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["ssh", *given, "-G", "--", name], capture_output=True, text=True, timeout=_SSH_S, check=False
        )
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                return line.partition(" ")[2]
    return name


def _address_towards(host: str) -> str:
    """The own address on the way to another machine; "" where that cannot be told. Nothing is sent."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def run_in_allocation(
    request: Request,
    wish: Wish,
    *,
    hosts: HostList | None = None,
    most_nodes: int | None = None,
    tasks: str = "rank",
) -> dict[str, Any]:
    """Have srun start the ranks in the allocation that this process is in.

    Args:
        request: what the user wants.
        wish: the rest.
        hosts: the machines to use, with their slots; None: all of the allocation.
        most_nodes: how many of them at most.
        tasks: "rank": one task of srun for each rank; "node": one for each machine, an agent that starts its ranks.

    Raises:
        RunError: this is no allocation, or the run could not be started.

    """
    granted, parts = _in_allocation(request, hosts, most_nodes)
    if tasks == "rank":
        return run_tasks(request, Srun(granted), parts, wish)
    listed = HostList(tuple(Host(name, count, f"job {granted.job}") for name, count in parts))
    way = SrunWay(python=wish.python or sys.executable, granted=granted)
    agents_wish = AgentsWish(
        runs=wish.runs,
        name=wish.name,
        command=tuple(wish.command),
        stdout=wish.stdout,
        own_copies=wish.own_copies,
        env=tuple(f"{name}={value}" for name, value in wish.variables.items()),
        way=way,
        via="slurm",
        going_on=wish.going_on,
    )
    return run_there(request, listed, agents_wish)


def plan_in_allocation(
    request: Request, wish: Wish, *, hosts: HostList | None = None, most_nodes: int | None = None
) -> tuple[Plan, int, list[mpi.Flag]]:
    """What would be done in this allocation: the plan, the port, and the flags of srun; no rank is started.

    Args:
        request: what the user wants.
        wish: the rest.
        hosts: the machines to use, with their slots; None: all of the allocation.
        most_nodes: how many of them at most.

    Raises:
        RunError: this is no allocation, or the run could not be started.

    """
    granted, parts = _in_allocation(request, hosts, most_nodes)
    plan, port = plan_tasks(request, Srun(granted), parts, wish)
    return plan, port, srun.flags(granted, [(node.host, node.place.count) for node in plan.nodes])


def _in_allocation(
    request: Request, hosts: HostList | None, most_nodes: int | None
) -> tuple[srun.Allocation, list[tuple[str, int]]]:
    """The allocation, and the ranks on each of its machines that take part."""
    granted = srun.allocation(os.environ)
    named = [(host.name, host.slots) for host in hosts.hosts] if hosts else [(name, None) for name in granted.hosts]
    named = named[:most_nodes]
    if most_nodes is not None and len(named) < most_nodes and hosts is None:
        raise RunError(
            f"--nodes {most_nodes}, but the allocation has {len(granted.hosts)}",
            evidence=[f"job {granted.job}: {', '.join(granted.hosts)}"],
            cure=f"ask Slurm for more:  salloc --nodes={most_nodes} ...",
        )
    counts = srun.counts(request.nproc, granted, [name for name, _ in named], device=request.device)
    parts = [(name, slots or count) for (name, slots), count in zip(named, counts, strict=True)]
    return granted, parts


@dataclass(frozen=True)
class SrunWay(Way):
    """How agents are started inside an allocation: by a step of one task on each machine."""

    granted: srun.Allocation | None = None

    def agent(self, host: Host, marker: str, *, connect_s: float = 0.0) -> list[str]:
        """The command that starts an agent there; a step that cannot be had at once is waited for."""
        del connect_s
        assert self.granted is not None
        return srun.agent_argv(self.granted, host.name, self.child(), marker)


class Srun:
    """Starts tasks by srun: see :class:`instep.launch.tasks.run.Starter`."""

    name, title, via = "srun", "srun", "slurm"
    limit_s: float | None = None
    ssh_config: Path | None = None

    def __init__(self, granted: srun.Allocation) -> None:
        # Stable over requeues: what is written down about the port stays true. A former life that still holds it is
        # found by binding, and then the next one is taken.
        self.port_key = f"slurm {granted.job}"
        self.environ: Mapping[str, str] = srun.environ_for_srun(os.environ)
        self._granted = granted

    def lost(self, host: str, marker: str) -> None:
        """Slurm's own daemon there ends what is left."""

    def argv(self, parts: Sequence[tuple[str, int]], command: Sequence[str]) -> list[str]:
        """The command line."""
        return srun.argv(srun.flags(self._granted, parts), command)
