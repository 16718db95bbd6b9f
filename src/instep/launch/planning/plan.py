"""A request becomes a plan. Pure: no process is started and no file touched."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.planning.place import LOOPBACK, Place, rank_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.planning.machine import Machine
    from instep.launch.planning.target import Target

_RANKS_PER_CORE = 8
_RANKS_ALWAYS = 64


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        target: the program.
        nproc: a number, or "auto": one rank per GPU, or one where there is none.
        device: "auto", "cpu" or "cuda".
        show: "main" or "all": whose output comes to the screen.
        grace: seconds that the ranks have to leave after a signal.
        guard: "kill", "warn" or "off": what is done about ranks that are out of step.
        suspect_s: how long a suspicion must stand where nothing proves it.
        max_restarts: how often the ranks are started again after a failure.

    """

    target: Target
    nproc: str = "auto"
    device: str = "auto"
    show: str = "main"
    grace: float = 30.0
    guard: str = "kill"
    suspect_s: float = 8.0
    max_restarts: int = 0


@dataclass(frozen=True)
class Site:
    """A machine that takes part, as it was found.

    Attributes:
        host: as the user named it; what ssh is given.
        machine: what it has.
        slots: ranks that it is to run, where the user has said so for this machine.
        address: where the others reach it.
        interface: the network interface of that address, "" on one machine alone.

    """

    host: str
    machine: Machine
    slots: int | None = None
    address: str = LOOPBACK
    interface: str = ""


@dataclass(frozen=True)
class Node:
    """A machine's part of the plan.

    Attributes:
        host: as the user named it.
        name: its own name.
        place: which ranks.
        address: where the others reach it.
        interface: the network interface of that address, "" on one machine alone.
        threads: CPU threads of each rank.
        threads_why: how they were chosen.
        variables: set for the ranks of this machine before anything is imported.

    """

    host: str
    name: str
    place: Place
    address: str
    interface: str
    threads: int
    threads_why: str
    variables: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The machine's part as plain values."""
        return {
            "host": self.host,
            "name": self.name,
            "ranks": list(self.place.ranks),
            "address": self.address,
            "interface": self.interface,
            "threads": self.threads,
            "variables": dict(self.variables),
        }


@dataclass(frozen=True)
class Plan:
    """What will be done.

    Attributes:
        target: the program.
        nodes: the machines, in the order of their ranks.
        why: one line on the number of ranks, where "auto" chose it.
        device: "cpu" or "cuda".
        ports: the range that the master port is taken from.
        show: "main" or "all".
        grace: seconds.
        guard: "kill", "warn" or "off".
        suspect_s: seconds.
        max_restarts: how often the ranks are started again after a failure.
        restart: how often they have been.

    """

    target: Target
    nodes: tuple[Node, ...]
    why: str
    device: str
    ports: tuple[int, int]
    show: str
    grace: float
    guard: str = "kill"
    suspect_s: float = 8.0
    max_restarts: int = 0
    restart: int = 0

    @property
    def host(self) -> str:
        """The main rank's machine, by its own name."""
        return self.nodes[0].name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes[0].place.world_size

    @property
    def master_addr(self) -> str:
        """Where the ranks meet."""
        return self.nodes[0].place.master_addr

    @property
    def threads(self) -> int:
        """CPU threads of each rank of the main rank's machine."""
        return self.nodes[0].threads

    def node_of(self, rank: int) -> Node:
        """The machine that runs the rank."""
        return next(node for node in self.nodes if rank in node.place.ranks)

    def torchrun(self) -> str:
        """The torchrun command that would start the same ranks on this machine."""
        words = ["torchrun", "--standalone", f"--nproc-per-node={self.world_size}", *self.target.words]
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.nodes[0].variables.items()]
        return " ".join([*settings, shlex.join(words)])

    def environment(self, rank: int) -> dict[str, str]:
        """What the rank will find set, with words for what is known at the start only."""
        node = self.node_of(rank)
        own = rank_environment(
            rank, node.place, "PORT", "JOB", "RUN", restart=self.restart, max_restarts=self.max_restarts
        )
        return {**node.variables, "INSTEP_RUN": "RUN", "INSTEP_JOB": "JOB", **own}

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, for ``--dry-run --json``."""
        alone = {"torchrun": self.torchrun()} if len(self.nodes) == 1 else {}
        return {
            "script": self.target.name,
            "arguments": list(self.target.arguments),
            "hosts": [node.host for node in self.nodes],
            "world_size": self.world_size,
            "device": self.device,
            "threads": self.threads,
            "guard": self.guard,
            "master_addr": self.master_addr,
            "master_ports": list(self.ports),
            "variables": dict(self.nodes[0].variables),
            "environment": [self.environment(rank) for rank in range(self.world_size)],
            "nodes": [node.as_json() for node in self.nodes],
            **alone,
        }


def make_plan(request: Request, sites: Sequence[Site], environ: Mapping[str, str]) -> Plan:
    """Decide everything that can be decided before a process is started.

    Args:
        request: what the user wants.
        sites: the machines that take part, in the order of their ranks.
        environ: of the launcher.

    Raises:
        RunError: the request cannot be met on these machines.

    """
    _check(request)
    device = _device(request.device, sites)
    counts, why = _counts(request.nproc, device, sites)
    for site, count in zip(sites, counts, strict=True):
        if device == "cuda" and count > site.machine.gpus:
            raise RunError(
                f"{count} ranks need {count} GPUs; {site.host} has {site.machine.gpus}",
                evidence=_mask(environ),
                cure=f"start at most {site.machine.gpus}, or use the CPU:  instep run --nproc {count} --device cpu ...",
            )
    nodes = _nodes(request, sites, counts, environ)
    return Plan(
        target=request.target,
        nodes=tuple(nodes),
        why=why,
        device=device,
        ports=sites[0].machine.ports,
        show=request.show,
        grace=request.grace,
        guard=request.guard,
        suspect_s=request.suspect_s,
        max_restarts=request.max_restarts,
    )


def _check(request: Request) -> None:
    if not (math.isfinite(request.grace) and request.grace >= 0):
        raise RunError(f"--grace {request.grace:g} is no time to wait", cure="give seconds, such as --grace 30")
    if not (math.isfinite(request.suspect_s) and request.suspect_s >= 1):
        raise RunError(
            f"--guard-suspect {request.suspect_s:g} is too short: a rank may well stand so long and be in step",
            cure="give 1 second or more, such as --guard-suspect 8; or only be told: --guard warn",
        )
    if request.max_restarts < 0:
        raise RunError(
            f"--max-restarts {request.max_restarts} is no number of restarts", cure="give 0 or more: --max-restarts 3"
        )


def _nodes(request: Request, sites: Sequence[Site], counts: Sequence[int], environ: Mapping[str, str]) -> list[Node]:
    """The machines' parts: consecutive ranks in the order of the list."""
    world_size, first = sum(counts), 0
    nodes = []
    for number, (site, count) in enumerate(zip(sites, counts, strict=True)):
        threads, threads_why = _threads(count, site.machine, environ)
        nodes.append(
            Node(
                host=site.host,
                name=site.machine.host,
                place=Place(first, count, world_size, number, len(sites), sites[0].address),
                address=site.address,
                interface=site.interface,
                threads=threads,
                threads_why=threads_why,
                variables=_variables(request, threads, site.interface, environ),
            )
        )
        first += count
    return nodes


def _variables(request: Request, threads: int, interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    variables = {"OMP_NUM_THREADS": str(threads)}
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environ:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if request.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if interface and "GLOO_SOCKET_IFNAME" not in environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    if interface and "NCCL_SOCKET_IFNAME" not in environ:
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=": this name, not all that begin with it
    return variables


def _mask(environ: Mapping[str, str]) -> list[str]:
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    return [f"CUDA_VISIBLE_DEVICES={mask}"] if mask is not None else []


def _device(wanted: str, sites: Sequence[Site]) -> str:
    without = [site.host for site in sites if not site.machine.gpus]
    if wanted == "cpu" or (wanted == "auto" and len(without) == len(sites)):
        return "cpu"
    if without and wanted == "cuda":
        has = "has" if len(without) == 1 else "have"
        raise RunError(
            f"--device cuda, but {', '.join(without)} {has} no NVIDIA GPU that this process may use",
            cure="use the CPU:  --device cpu",
        )
    if without:
        raise RunError(
            "some machines have GPUs and some have none",
            evidence=[f"{site.host}: {site.machine.gpus} GPUs" for site in sites],
            cure="leave those without out of the list, or use the CPU everywhere:  --device cpu",
        )
    return "cuda"


def _counts(nproc: str, device: str, sites: Sequence[Site]) -> tuple[list[int], str]:
    """Ranks on each machine, and a line on it where "auto" chose."""
    counts = [site.slots or _count(nproc, device, site) for site in sites]
    if nproc != "auto" or all(site.slots for site in sites):
        return counts, ""
    if device == "cpu":
        return counts, "--nproc auto: no GPU in use, so one rank" + (" on each machine" if len(sites) > 1 else "")
    return counts, f"--nproc auto: one per GPU of {sites[0].host if len(sites) == 1 else 'each machine'}"


def _count(nproc: str, device: str, site: Site) -> int:
    machine = site.machine
    if nproc == "auto":
        return machine.gpus if device == "cuda" else 1
    try:
        ranks = int(nproc)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise RunError(
            f"--nproc {nproc} is no number of ranks", cure="give 1 or more, or auto (one rank per GPU): --nproc 2"
        )
    most = max(_RANKS_ALWAYS, _RANKS_PER_CORE * machine.cores, machine.gpus)
    if ranks > most:
        raise RunError(
            f"--nproc {nproc} is more than {site.host} can run",
            evidence=[f"{machine.cores} CPU cores, {machine.gpus} GPUs"],
            cure=f"at most --nproc {most} there",
        )
    return ranks


def _threads(count: int, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given), "OMP_NUM_THREADS as you set it"
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return max(1, machine.cores // count), f"{cores} / {count} rank{'s' if count > 1 else ''}"
