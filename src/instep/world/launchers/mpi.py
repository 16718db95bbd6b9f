"""mpirun and mpiexec, from the environment alone: no mpi4py, no MPI library.

Sources: the manuals of mpirun(1) of Open MPI 4 and 5, of Hydra (MPICH 4), Intel MPI's Developer Reference
("Other Environment Variables"), MVAPICH2's user guide §"Environment"; checked against the real launchers in
``tests/real``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import WorldError
from instep.world.reading import Reading, Refusal, Variables, check, node_of

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Names:
    """How one MPI names what it tells its ranks, in the order in which the names are tried."""

    launcher: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    job_id: tuple[str, ...] = ()


# Intel MPI and MVAPICH2 are asked before MPICH, whose Hydra they grew from and whose names they also set.
TABLE = (
    Names(
        "openmpi",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        num_nodes=("OMPI_MCA_orte_num_nodes",),
        job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Names(
        "mvapich2",
        marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job_id=("PMI_JOBID", "PMI_PORT"),
    ),
    Names(
        "intelmpi",
        marks=("I_MPI_HYDRA_HOST_FILE", "I_MPI_RANK", "I_MPI_INFO_NUMA_NODE_NUM"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        job_id=("PMI_JOBID", "PMI_PORT"),
    ),
    Names(
        "mpich",
        marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        job_id=("PMI_JOBID", "PMI_PORT"),
    ),
    # PMIx alone (prterun, srun --mpi=pmix) gives a rank and no size; Slurm's step, where there is one, gives it.
    Names(
        "pmix",
        marks=("PMIX_RANK",),
        rank=("PMIX_RANK",),
        world_size=("PMIX_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("PMIX_LOCAL_RANK", "SLURM_LOCALID"),
        local_world_size=("PMIX_LOCAL_SIZE",),
        job_id=("PMIX_NAMESPACE",),
    ),
)


def read(env: Mapping[str, str]) -> Reading | Refusal | None:
    """What the variables of the first MPI that left its marks say."""
    for names in TABLE:
        if any(env.get(mark) for mark in names.marks):
            return _read(env, names)
    return None


def _read(env: Mapping[str, str], names: Names) -> Reading | Refusal:
    variables = Variables(env)
    rank = variables.number("rank", *names.rank)
    world_size = variables.number("world_size", *names.world_size, least=1)
    if rank is None or world_size is None:
        return Refusal(names.launcher, _unusable(env, names, "rank" if rank is None else "number of ranks"))
    local_rank = variables.number("local_rank", *names.local_rank)
    local_world_size = variables.number("local_world_size", *names.local_world_size, least=1)
    num_nodes = variables.number("num_nodes", *names.num_nodes, least=1)
    node_rank = None
    if local_world_size == world_size:
        node_rank, num_nodes = 0, 1
        variables.because("num_nodes", "", "all ranks are on this machine")
    # MPI numbers its nodes for nobody. Where each has as many ranks as this one, the number follows; where this
    # may be the node with the remainder (3 ranks and 1), it does not, and is left to the ranks' meeting.
    if local_rank is not None and local_world_size and num_nodes and num_nodes * local_world_size == world_size:
        node_rank = node_of(rank, local_rank, local_world_size, num_nodes)
        variables.because("node_rank", "", "from the numbers above")
    job_id = variables.text("job_id", *names.job_id, "SLURM_JOB_ID") or ""
    mark = next(mark for mark in names.marks if env.get(mark))
    variables.because("launcher", f"{mark}={env[mark]}")
    return check(
        Reading(
            launcher=names.launcher,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            job_id=job_id,
            port_key=job_id,
            evidence=variables.evidence,
        )
    )


def _unusable(env: Mapping[str, str], names: Names, lacks: str) -> WorldError:
    known = {*names.marks, *names.rank, *names.world_size, *names.local_rank, *names.job_id}
    return WorldError(
        f"{names.launcher} started this process, but its variables do not give the {lacks}.",
        evidence=[f"{name}={env[name]}" for name in sorted(known) if env.get(name)]
        + [f"not set: {' or '.join(names.rank if lacks == 'rank' else names.world_size)}"],
        cure="Start it by mpirun (Open MPI, MPICH, Intel MPI) or srun, give instep.init(rank=..., world_size=...),\n"
        "or, if the variables are leftovers of another job, unset them.",
    )
