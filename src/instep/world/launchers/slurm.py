"""srun: a *step* of a Slurm job. "srun is installed" or "a job is there" is not "srun started me".

Source: srun(1), section "Output environment variables", of Slurm 22.05 to 26.05; the reserved step numbers are
those of ``slurm/slurm.h`` (SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import WorldError
from instep.world import nodelist
from instep.world.reading import Reading, Refusal, Variables, check

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_RESERVED_STEP = 0xFFFF_FFF0  # the batch script, an interactive shell, ...: one process, no ranks
_JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")


def read(env: Mapping[str, str]) -> Reading | Refusal | None:
    """What the variables of a Slurm step say; a refusal for an allocation of several tasks without a step."""
    variables = Variables(env)
    step = variables.number("launcher", *_STEP_ID)
    if step is not None and step < _FIRST_RESERVED_STEP:
        return _step(env, variables, step)
    job = variables.text("job_id", *_JOB_ID)
    tasks = variables.number("world_size", "SLURM_NTASKS", "SLURM_NPROCS", least=1) or 1
    nodes = variables.number("num_nodes", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", least=1) or 1
    if job is None or (tasks == 1 and nodes == 1):
        return None
    return Refusal("slurm", _no_step(env, job, tasks, nodes))


def _step(env: Mapping[str, str], variables: Variables, step: int) -> Reading | Refusal:
    rank = variables.number("rank", "SLURM_PROCID")
    world_size = variables.number("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    if rank is None or world_size is None:
        lacks = "SLURM_PROCID" if rank is None else "SLURM_STEP_NUM_TASKS"
        return Refusal("slurm", _half(env, lacks))
    node_rank = variables.number("node_rank", "SLURM_NODEID")
    num_nodes = variables.number("num_nodes", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", least=1)
    job_id = variables.text("job_id", *_JOB_ID) or ""
    restarts = env.get("SLURM_RESTART_COUNT") or "0"
    return check(
        Reading(
            launcher="slurm",
            rank=rank,
            world_size=world_size,
            local_rank=variables.number("local_rank", "SLURM_LOCALID"),
            local_world_size=_local_world_size(variables, world_size, node_rank),
            node_rank=node_rank,
            num_nodes=num_nodes,
            master_addr=_main_host(variables),
            job_id=job_id,
            # A requeued job keeps its id, and its former life may still hold the port.
            port_key=f"slurm {job_id}.{step} restart {restarts}",
            evidence=variables.evidence,
        )
    )


def _local_world_size(variables: Variables, world_size: int, node_rank: int | None) -> int | None:
    text = variables.text("local_world_size", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if text is None or node_rank is None:
        return None
    counts = nodelist.tasks_per_node(text)
    if sum(counts) != world_size or node_rank >= len(counts):
        raise WorldError(
            f"Slurm's variables contradict each other: {world_size} tasks, and {sum(counts)} on all nodes together.",
            evidence=[
                entry.source
                for entry in variables.evidence
                if entry.field in ("world_size", "local_world_size", "node_rank")
            ],
            cure="Do not export SLURM_* variables by hand; start the ranks with one srun.",
        )
    return counts[node_rank]


def _main_host(variables: Variables) -> str | None:
    """The host of rank 0: the first of the step's list (SLURM_LAUNCH_NODE_IPADDR is only where srun was typed)."""
    text = variables.text("master_addr", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return nodelist.expand(text)[0] if text else None


def main_host_of_job(env: Mapping[str, str]) -> tuple[str, str] | None:
    """(first host of the allocation, the variable that said so), for an mpirun inside an allocation."""
    variables = Variables(env)
    text = variables.text("master_addr", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return (nodelist.expand(text)[0], variables.evidence[0].source) if text else None


def _no_step(env: Mapping[str, str], job: str, tasks: int, nodes: int) -> WorldError:
    names = (*_JOB_ID[:1], "SLURM_NTASKS", "SLURM_NNODES", *_STEP_ID[:1], "SLURM_JOB_NAME")
    return WorldError(
        f"This is a shell inside Slurm job {job} ({tasks} tasks on {nodes} nodes), but no srun started this process "
        "as one of its tasks.",
        evidence=[f"{name}={env[name]}" for name in names if env.get(name)]
        + ([] if any(env.get(name) for name in _STEP_ID) else ["not set: SLURM_STEP_ID"]),
        cure="Start one process per task:  srun python train.py\n"
        "or ranks on this machine only:  instep run --nproc 2 train.py\n"
        "or, for one process alone, say so:  instep.init(rank=0, world_size=1)",
    )


def _half(env: Mapping[str, str], lacks: str) -> WorldError:
    return WorldError(
        f"This process belongs to a Slurm step, but {lacks} is not set.",
        evidence=[f"{name}={env[name]}" for name in sorted(env) if name.startswith("SLURM_STEP")],
        cure="Do not clear SLURM_* variables in the job script; start the ranks with:  srun python train.py",
    )
