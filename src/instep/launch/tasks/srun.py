"""Inside a Slurm allocation: what it grants, and the srun that starts one task for each rank. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.launch.tasks.mpi import Flag
from instep.world import nodelist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What salloc and sbatch leave for srun, and what would contradict the exact places that are asked for.
NOT_FOR_SRUN = (
    *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_ARBITRARY_NODELIST"),
)


@dataclass(frozen=True)
class Allocation:
    """What Slurm has granted.

    Attributes:
        job: its number.
        restart: how often the job has been requeued.
        hosts: the machines, in Slurm's order.
        cpus: of each machine; 0 where Slurm does not say.
        tasks: of each machine, where the user asked for a number of tasks; else none.
        gpus: of each machine, 0 for none.
        cpus_per_task: as the user asked for it, 0 where he did not.

    """

    job: str
    hosts: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    gpus: int = 0
    cpus_per_task: int = 0
    restart: int = 0


def is_inside(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an allocation, and not already one of a run's own ranks."""
    return bool(environ.get("SLURM_JOB_ID")) and not environ.get("INSTEP_JOB")


def allocation(environ: Mapping[str, str]) -> Allocation:
    """What the variables of salloc or sbatch say.

    Raises:
        RunError: this is no allocation.
        WorldError: its variables cannot be read.

    """
    job, text = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
    if not job or not text:
        raise RunError(
            "this is no Slurm allocation",
            evidence=[f"not set: {name}" for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if not environ.get(name)],
            cure="ask for one:  salloc --nodes=2 instep run --via slurm ...\nor submit:    instep run --via slurm ...",
        )
    hosts = tuple(nodelist.expand(text))
    wanted = any(environ.get(name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"))
    return Allocation(
        job=job,
        hosts=hosts,
        cpus=_each(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), hosts),
        tasks=_each(environ.get("SLURM_TASKS_PER_NODE", ""), hosts) if wanted else (),
        gpus=_gpus(environ),
        cpus_per_task=_number(environ.get("SLURM_CPUS_PER_TASK", "")),
        restart=_number(environ.get("SLURM_RESTART_COUNT", "")),
    )


def _each(text: str, hosts: Sequence[str]) -> tuple[int, ...]:
    """``4(x2),2``: a number for each machine; none where there are not as many."""
    found = tuple(nodelist.tasks_per_node(text)) if text else ()
    return found if len(found) == len(hosts) else ()


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _gpus(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        text = environ.get(name, "").rpartition(":")[2]  # a type may stand before the number: a100:4
        if _number(text):
            return _number(text)
    return 0


def counts(nproc: str, granted: Allocation, hosts: Sequence[str], *, device: str = "auto") -> list[int]:
    """Ranks on each of these machines.

    What the user says by --nproc counts; else the tasks that he asked Slurm for; else one for each GPU; else one.

    Raises:
        RunError: `nproc` is no number, or a machine is not in the allocation.

    """
    for host in hosts:
        if host not in granted.hosts:
            raise RunError(
                f"{host} is not in this allocation",
                evidence=[f"job {granted.job}: {', '.join(granted.hosts)}"],
                cure="leave --hosts out to use all of them",
            )
    if nproc != "auto":
        if not (nproc.isascii() and nproc.isdigit() and int(nproc)):
            raise RunError(
                f"--nproc {nproc} is no number of ranks", cure="give 1 or more, or auto (the tasks of the allocation)"
            )
        return [int(nproc)] * len(hosts)
    if granted.tasks:
        return [granted.tasks[granted.hosts.index(host)] for host in hosts]
    return [granted.gpus if granted.gpus and device != "cpu" else 1] * len(hosts)


def flags(granted: Allocation, parts: Sequence[tuple[str, int]]) -> list[Flag]:
    """How srun starts so many tasks on each of these machines, in this order.

    Args:
        granted: the allocation.
        parts: machines and their numbers of ranks.

    """
    each = ",".join(host for host, count in parts for _ in range(count))
    cpus = [granted.cpus[granted.hosts.index(host)] if granted.cpus else 0 for host, _ in parts]
    fair = min(max(1, has // count) for has, (_, count) in zip(cpus, parts, strict=True))
    wide = granted.cpus_per_task or fair
    found = [
        Flag((f"--ntasks={sum(count for _, count in parts)}",), "one task for each rank"),
        Flag(("--distribution=arbitrary", f"--nodelist={each}"), "the machine of each rank, in the order of the ranks"),
        Flag((f"--cpus-per-task={wide}",), "said again, since srun of Slurm 22.05 ignores what sbatch was told"),
        Flag(("--kill-on-bad-exit=1",), "if one task fails, end all"),
        Flag(("--overlap",), "another step of this job, such as a shell, does not hinder"),
        Flag(("--export=ALL",), "the ranks have the variables of here"),
    ]
    if any(has and wide * count > has for has, (_, count) in zip(cpus, parts, strict=True)):
        found.append(Flag(("--overcommit",), "more ranks than the allocation has cores"))
    if granted.gpus:
        found.append(
            Flag(("--gpu-bind=none",), "each rank sees all GPUs of its machine, and takes that of its LOCAL_RANK")
        )
    return found


def argv(given: Sequence[Flag], command: Sequence[str]) -> list[str]:
    """The whole command line."""
    return ["srun", *(word for flag in given for word in flag.words), *command]


def agent_argv(granted: Allocation, host: str, command: Sequence[str], marker: str) -> list[str]:
    """The command line that starts one agent on one machine, with all cores of it that the job has."""
    cpus = granted.cpus[granted.hosts.index(host)] if granted.cpus and host in granted.hosts else 1
    given = [
        Flag(("--nodes=1", "--ntasks=1", f"--nodelist={host}"), "one agent on this machine"),
        Flag((f"--cpus-per-task={cpus}",), "with all cores that the job has there"),
        Flag(("--kill-on-bad-exit=1", "--overlap", "--export=ALL", "--unbuffered"), "as for tasks; lines come at once"),
    ]
    unset = [word for name in NOT_FOR_SRUN for word in ("-u", name)]
    return ["env", *unset, *argv(given, ["env", f"INSTEP_JOB={marker}", *command])]


def environ_for_srun(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what would contradict the command line."""
    source = os.environ if environ is None else environ
    return {name: value for name, value in source.items() if name not in NOT_FOR_SRUN}
