"""A request becomes a plan. Pure: no process is started and no file touched."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.signals import ENDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instep.launch.machine import Machine
    from instep.launch.target import Target

MASTER_ADDR = "127.0.0.1"  # all ranks are on this machine
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

    """

    target: Target
    nproc: str = "auto"
    device: str = "auto"
    show: str = "main"
    grace: float = 30.0
    guard: str = "kill"
    suspect_s: float = 8.0


@dataclass(frozen=True)
class Plan:
    """What will be done.

    Attributes:
        target: the program.
        host: the machine.
        world_size: number of ranks.
        why: one line on the number of ranks, where "auto" chose it.
        device: "cpu" or "cuda".
        threads: CPU threads of each rank.
        threads_why: how they were chosen.
        ports: the range that the master port is taken from.
        variables: set for all ranks before anything is imported.
        show: "main" or "all".
        grace: seconds.
        guard: "kill", "warn" or "off".
        suspect_s: seconds.

    """

    target: Target
    host: str
    world_size: int
    why: str
    device: str
    threads: int
    threads_why: str
    ports: tuple[int, int]
    variables: Mapping[str, str]
    show: str
    grace: float
    guard: str = "kill"
    suspect_s: float = 8.0

    def torchrun(self) -> str:
        """The torchrun command that would start the same ranks."""
        words = ["torchrun", "--standalone", f"--nproc-per-node={self.world_size}", *self.target.words]
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, shlex.join(words)])

    def environment(self, rank: int) -> dict[str, str]:
        """What the rank will find set, with words for what is known at the start only."""
        own = rank_environment(rank, self.world_size, "PORT", "JOB", "RUN")
        return {**self.variables, "INSTEP_RUN": "RUN", "INSTEP_JOB": "JOB", **own}

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, for ``--dry-run --json``."""
        return {
            "script": self.target.name,
            "arguments": list(self.target.arguments),
            "hosts": [self.host],
            "world_size": self.world_size,
            "device": self.device,
            "threads": self.threads,
            "guard": self.guard,
            "master_addr": MASTER_ADDR,
            "master_ports": list(self.ports),
            "variables": dict(self.variables),
            "environment": [self.environment(rank) for rank in range(self.world_size)],
            "torchrun": self.torchrun(),
        }


def make_plan(request: Request, machine: Machine, environ: Mapping[str, str]) -> Plan:
    """Decide everything that can be decided before a process is started.

    Raises:
        RunError: the request cannot be met on this machine.

    """
    if not (math.isfinite(request.grace) and request.grace >= 0):
        raise RunError(f"--grace {request.grace:g} is no time to wait", cure="give seconds, such as --grace 30")
    if not (math.isfinite(request.suspect_s) and request.suspect_s >= 1):
        raise RunError(
            f"--guard-suspect {request.suspect_s:g} is too short: a rank may well stand so long and be in step",
            cure="give 1 second or more, such as --guard-suspect 8; or only be told: --guard warn",
        )
    device = _device(request.device, machine)
    world_size, why = _world_size(request.nproc, device, machine)
    if device == "cuda" and world_size > machine.gpus:
        raise RunError(
            f"{world_size} ranks need {world_size} GPUs; {machine.host} has {machine.gpus}",
            evidence=_mask(environ),
            cure=f"start at most {machine.gpus}, or use the CPU:  instep run --nproc {world_size} --device cpu ...",
        )
    threads, threads_why = _threads(world_size, machine, environ)
    variables = {"OMP_NUM_THREADS": str(threads)}
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environ:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if request.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return Plan(
        target=request.target,
        host=machine.host,
        world_size=world_size,
        why=why,
        device=device,
        threads=threads,
        threads_why=threads_why,
        ports=machine.ports,
        variables=variables,
        show=request.show,
        grace=request.grace,
        guard=request.guard,
        suspect_s=request.suspect_s,
    )


def _mask(environ: Mapping[str, str]) -> list[str]:
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    return [f"CUDA_VISIBLE_DEVICES={mask}"] if mask is not None else []


def _device(wanted: str, machine: Machine) -> str:
    if wanted == "cuda" and not machine.gpus:
        raise RunError(
            f"--device cuda, but {machine.host} has no NVIDIA GPU that this process may use",
            cure="use the CPU:  --device cpu",
        )
    if wanted == "auto":
        return "cuda" if machine.gpus else "cpu"
    return wanted


def _world_size(nproc: str, device: str, machine: Machine) -> tuple[int, str]:
    if nproc == "auto":
        if device == "cuda":
            return machine.gpus, f"--nproc auto: one per GPU of {machine.host}"
        return 1, "--nproc auto: no GPU in use, so one rank"
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
            f"--nproc {nproc} is more than {machine.host} can run",
            evidence=[f"{machine.cores} CPU cores, {machine.gpus} GPUs"],
            cure=f"at most --nproc {most} here",
        )
    return ranks, ""


def _threads(world_size: int, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given), "OMP_NUM_THREADS as you set it"
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return max(1, machine.cores // world_size), f"{cores} / {world_size} rank{'s' if world_size > 1 else ''}"


def rank_environment(rank: int, world_size: int, port: int | str, job: str, folder: str) -> dict[str, str]:
    """What torchrun sets for a rank of a job on one machine, so that a script or library finds what it looks for."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in ENDING),
        "TORCHELASTIC_ERROR_FILE": f"{folder}/log/rank-{rank}.error.json",
    }
