"""Golden tables: an environment, and who the process is (R8, R9). The environments are those of real launchers:
Slurm 22.05, Open MPI 4.1, MPICH 4.0, torch 2.13; tests/real asks the launchers themselves."""

from __future__ import annotations

from typing import Any

import pytest

from instep.errors import WorldError
from instep.world import World, resolve

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "run1",
}
STEP_2X2 = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "rack[0-1]node1",
    "SLURM_STEP_NODELIST": "rack[0-1]node1",
}
STEP_UNEVEN = {
    **STEP_2X2,
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "a[01-03,07]",
}
ONE_PER_NODE = {
    **STEP_2X2,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "11",
    "SLURM_JOB_NAME": "b.sh",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SALLOC_SHELL = {
    "SLURM_JOB_ID": "22",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "3,1",
}
INTERACTIVE_STEP = {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
ONE_TASK_JOB = {**BATCH_SHELL, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "2",  # in Open MPI's words the process's number on its node
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "2117795841",
}
OPENMPI_2X2 = {
    **OPENMPI,
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_num_nodes": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
DAEMON_STEP = {**ONE_PER_NODE, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}

A = "10.0.0.1"
HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": A}
# Columns: name; environment; rank, world, local rank, local world, node, nodes; master; launcher.
GOLDEN: list[tuple[str, dict[str, str], tuple[int | None, ...], str, str]] = [
    ("torchrun", TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("instep run", TORCHRUN | {"INSTEP_JOB": "run1"}, (5, 8, 1, 4, 1, 2), A, "instep run"),
    ("torchrun inside a rank of instep run", TORCHRUN | {"INSTEP_JOB": "another"}, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("torchrun in a batch script", BATCH_SHELL | TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("torchrun in a salloc shell", SALLOC_SHELL | TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("torchrun in srun", ONE_PER_NODE | TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("torchrun in srun, LOCAL_RANK is not SLURM_LOCALID", STEP_2X2 | TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("four torchruns in srun, one world each", STEP_2X2 | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
     "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, (0, 2, 0, 2, 0, 1), A, "torchrun"),
    ("torchrun in mpirun", OPENMPI | TORCHRUN, (5, 8, 1, 4, 1, 2), A, "torchrun"),
    ("by hand, local numbers unknown", HAND, (1, 4, None, None, None, None), A, "environment"),
    ("by hand, on one machine", HAND | {"MASTER_ADDR": "localhost"}, (1, 4, 1, 4, 0, 1), "localhost", "environment"),
    ("by hand, all said", HAND | {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2, 1, 2), A,
     "environment"),
    ("srun 2 x 2", STEP_2X2, (3, 4, 1, 2, 1, 2), "rack0node1", "slurm"),
    ("srun, uneven", STEP_UNEVEN, (6, 7, 0, 1, 3, 4), "a01", "slurm"),
    ("srun, a job named bash", STEP_2X2 | {"SLURM_JOB_NAME": "bash"}, (3, 4, 1, 2, 1, 2), "rack0node1", "slurm"),
    ("srun, old names", {"SLURM_JOBID": "7", "SLURM_STEPID": "1", "SLURM_PROCID": "1", "SLURM_NPROCS": "2",
     "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "b5-ib,a[1-2]",
     "SLURM_TASKS_PER_NODE": "1(x2)"}, (1, 2, 0, 1, 1, 2), "b5-ib", "slurm"),
    ("srun -n2 inside sbatch -n4", STEP_2X2 | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2",
     "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
     "SLURM_STEP_NODELIST": "rack0node1"}, (1, 2, 1, 2, 0, 1), "127.0.0.1", "slurm"),
    ("srun --pty bash, one task", ONE_TASK_JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
     (0, 1, 0, 1, 0, 1), "127.0.0.1", "slurm"),
    ("srun --mpi=pmi2", STEP_2X2 | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "7.0"},
     (3, 4, 1, 2, 1, 2), "rack0node1", "slurm"),
    ("srun --mpi=pmix", STEP_2X2 | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
     (3, 4, 1, 2, 1, 2), "rack0node1", "slurm"),
    ("srun, RANK and company exported from it", STEP_2X2 | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
     (3, 4, 1, 2, 1, 2), "rack0node1", "slurm"),
    ("srun, WORLD_SIZE and MASTER_ADDR exported by the batch script", STEP_2X2 | {"WORLD_SIZE": "4", "MASTER_ADDR": A},
     (3, 4, 1, 2, 1, 2), A, "slurm"),
    ("srun, whose task spawned and exported RANK", ONE_PER_NODE | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
     "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2, 1, 2), "rack0node1", "environment"),
    ("one task in a batch script", ONE_TASK_JOB, (0, 1, 0, 1, 0, 1), "127.0.0.1", "alone"),
    ("salloc for one task", {"SLURM_JOB_ID": "3", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "8"},
     (0, 1, 0, 1, 0, 1), "127.0.0.1", "alone"),
    ("Open MPI", OPENMPI, (2, 3, 2, 3, 0, 1), "127.0.0.1", "openmpi"),
    ("Open MPI, two nodes", OPENMPI_2X2 | {"MASTER_ADDR": A}, (2, 4, 0, 2, 1, 2), A, "openmpi"),
    ("Open MPI, two nodes, by node", OPENMPI_2X2 | {"MASTER_ADDR": A, "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
     (2, 4, 1, 2, 0, 2), A, "openmpi"),
    ("Open MPI, the node with the remainder", OPENMPI_2X2 | {"MASTER_ADDR": A, "OMPI_COMM_WORLD_RANK": "3",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (3, 4, 0, 1, None, 2), A, "openmpi"),
    ("Open MPI in an allocation", DAEMON_STEP | OPENMPI_2X2 | {"SLURM_JOB_NODELIST": "n[1-2]"},
     (2, 4, 0, 2, 1, 2), "n1", "openmpi"),
    ("Open MPI in an allocation, all ranks on one node", DAEMON_STEP | OPENMPI, (2, 3, 2, 3, 0, 1), "127.0.0.1",
     "openmpi"),
    ("Open MPI from a batch script, on the node of the daemon's step", OPENMPI_2X2 | DAEMON_STEP | {
     "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
     "SLURM_STEP_NODELIST": "n2", "SLURM_JOB_NODELIST": "n[1-2]"}, (2, 4, 0, 2, 1, 2), "n1", "openmpi"),
    ("Open MPI from a batch script, on its first node", BATCH_SHELL | OPENMPI_2X2, (2, 4, 0, 2, 1, 2), "n1", "openmpi"),
    ("MPICH", MPICH, (1, 3, 1, 3, 0, 1), "127.0.0.1", "mpich"),
    ("MPICH, several nodes", MPICH | {"PMI_SIZE": "6", "MASTER_ADDR": A}, (1, 6, 1, 3, None, None), A, "mpich"),
    ("Intel MPI", MPICH | {"I_MPI_RANK": "1"}, (1, 3, 1, 3, 0, 1), "127.0.0.1", "intelmpi"),
    ("MVAPICH2", MVAPICH, (1, 2, 1, 2, 0, 1), "127.0.0.1", "mvapich2"),
    ("PMI without local numbers", {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": A},
     (1, 2, None, None, None, None), A, "mpich"),
    ("PMIx with a size", {"PMIX_RANK": "1", "PMIX_SIZE": "2", "MASTER_ADDR": A}, (1, 2, None, None, None, None), A,
     "pmix"),
    ("alone", {}, (0, 1, 0, 1, 0, 1), "127.0.0.1", "alone"),
    ("alone, with leftovers that say nothing", {"LOCAL_RANK": "0", "MASTER_ADDR": A}, (0, 1, 0, 1, 0, 1), "127.0.0.1",
     "alone"),
]  # fmt: skip


def numbers(world: World) -> tuple[int | None, ...]:
    return (
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        world.node_rank,
        world.num_nodes,
    )


@pytest.mark.parametrize(
    ("env", "expected", "master", "launcher"), [row[1:] for row in GOLDEN], ids=[r[0] for r in GOLDEN]
)
def test_golden(env: dict[str, str], expected: tuple[int | None, ...], master: str, launcher: str) -> None:
    world = resolve(env)
    assert (numbers(world), world.master_addr, world.launcher) == (expected, master, launcher)
    for field in ("rank", "world_size", "master_addr", "master_port", "launcher"):
        assert world.why(field), f"nothing says why {field} is {getattr(world, field)}"


# name, environment, what the error has to show
REFUSED: list[tuple[str, dict[str, str], list[str]]] = [
    ("WORLD_SIZE without RANK", {"WORLD_SIZE": "2"}, ["RANK is not set", "WORLD_SIZE=2"]),
    ("RANK without WORLD_SIZE", {"RANK": "2"}, ["WORLD_SIZE is not set", "RANK=2"]),
    ("TORCHELASTIC_RUN_ID alone", {"TORCHELASTIC_RUN_ID": "x"}, ["RANK is not set"]),
    ("RANK is WORLD_SIZE", HAND | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
    ("RANK is no number", HAND | {"RANK": "one"}, ["RANK='one'"]),
    ("RANK is negative", HAND | {"RANK": "-1"}, ["RANK='-1'"]),
    ("WORLD_SIZE is 0", HAND | {"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
    ("LOCAL_RANK too large", TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
    ("LOCAL_WORLD_SIZE too large", TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9"]),
    ("MASTER_PORT is no port", TORCHRUN | {"MASTER_PORT": "99999"}, ["MASTER_PORT='99999'"]),
    ("loopback master, two nodes", TORCHRUN | {"MASTER_ADDR": "127.0.0.1"}, ["MASTER_ADDR=127.0.0.1", "2 nodes"]),
    ("localhost, two nodes of Slurm", STEP_2X2 | {"MASTER_ADDR": "localhost"}, ["MASTER_ADDR=localhost"]),
    ("loopback master, two nodes of MPI", OPENMPI_2X2 | {"MASTER_ADDR": "::1"}, ["MASTER_ADDR=::1"]),
    ("salloc shell without a step", SALLOC_SHELL, ["SLURM_NTASKS=4", "not set: SLURM_STEP_ID", "srun python"]),
    ("batch shell", BATCH_SHELL, ["SLURM_NTASKS=4", "srun python"]),
    ("interactive step", INTERACTIVE_STEP, ["SLURM_STEP_ID=4294967290"]),
    ("salloc shell named bash", SALLOC_SHELL | {"SLURM_JOB_NAME": "bash"}, ["SLURM_JOB_NAME=bash"]),
    ("step without PROCID", {k: v for k, v in STEP_2X2.items() if k != "SLURM_PROCID"}, ["SLURM_PROCID is not set"]),
    ("step with odd counts", STEP_2X2 | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["SLURM_STEP_TASKS_PER_NODE=2(x3)"]),
    ("step with unreadable counts", STEP_2X2 | {"SLURM_STEP_TASKS_PER_NODE": "2x2"}, ["2x2"]),
    ("step with unreadable nodes", STEP_2X2 | {"SLURM_STEP_NODELIST": "n[1-"}, ["n[1-"]),
    ("Open MPI without a rank", {"OMPI_COMM_WORLD_SIZE": "3"}, ["OMPI_COMM_WORLD_SIZE=3", "not set: OMPI_COMM_WORLD_RANK"]),
    ("Open MPI without a size", {"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0"]),
    ("PMI size alone", {"PMI_SIZE": "3"}, ["PMI_SIZE=3"]),
    ("MPI_LOCALRANKID alone", {"MPI_LOCALRANKID": "0"}, ["MPI_LOCALRANKID=0"]),
    ("MVAPICH2 size alone", {"MV2_COMM_WORLD_SIZE": "3"}, ["MV2_COMM_WORLD_SIZE=3"]),
    ("PMIx without a size", {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, ["PMIX_RANK=0"]),
    ("Open MPI, two nodes, no address", OPENMPI_2X2, ["not set: MASTER_ADDR", "mpirun -x MASTER_ADDR"]),
    ("by hand, no address", {"RANK": "1", "WORLD_SIZE": "2"}, ["not set: MASTER_ADDR"]),
    ("RANK against a Slurm step", STEP_2X2 | HAND, ["RANK=1", "SLURM_PROCID=3"]),
    ("WORLD_SIZE against a Slurm step", STEP_2X2 | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"]),
    ("RANK outside of its task's block", ONE_PER_NODE | {"RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0", "SLURM_PROCID=1"]),
    ("Open MPI against a Slurm step", STEP_2X2 | OPENMPI_2X2, ["OMPI_COMM_WORLD_RANK=2", "SLURM_PROCID=3"]),
    ("RANK against Open MPI", OPENMPI | HAND, ["RANK=1", "OMPI_COMM_WORLD_RANK=2"]),
    ("LOCAL_RANK against Slurm", STEP_2X2 | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, ["local_rank 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("env", "shown"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(env: dict[str, str], shown: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        resolve(env)
    for text in shown:
        assert text in str(caught.value)
    assert caught.value.cure


# name, environment, what the caller gives, (rank, world, local_rank, local_world), launcher
GIVEN: list[tuple[str, dict[str, str], dict[str, Any], tuple[int | None, ...], str]] = [
    ("mp.spawn, all given", {}, {"rank": 1, "world_size": 3, "init_method": "tcp://127.0.0.1:29511"}, (1, 3, 1, 3), "given"),
    ("mp.spawn, to a file", {}, {"rank": 1, "world_size": 3, "init_method": "file:///tmp/x"}, (1, 3, None, None), "given"),
    ("given overrules", STEP_2X2, {"rank": 0, "world_size": 1}, (0, 1, 0, 1), "given"),
    ("given overrules a refusal", SALLOC_SHELL, {"rank": 0, "world_size": 1}, (0, 1, 0, 1), "given"),
    ("spawned, alone", {}, {"local_rank": 1, "local_world_size": 2}, (1, 2, 1, 2), "spawn"),
    ("one task per node that spawns", ONE_PER_NODE, {"local_rank": 2, "local_world_size": 4}, (6, 8, 2, 4), "slurm"),
    ("two tasks per node that spawn", STEP_2X2, {"local_rank": 2, "local_world_size": 3}, (11, 12, 5, 6), "slurm"),
    ("mpirun, one per node, that spawn", OPENMPI_2X2 | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": A}, {"local_rank": 1, "local_world_size": 2}, (3, 4, 1, 2), "openmpi"),
    ("torchrun, its own numbers given again", TORCHRUN, {"local_rank": 1, "local_world_size": 4}, (5, 8, 1, 4), "torchrun"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("env", "given", "expected", "launcher"), [row[1:] for row in GIVEN], ids=[row[0] for row in GIVEN]
)
def test_given(env: dict[str, str], given: dict[str, Any], expected: tuple[int | None, ...], launcher: str) -> None:
    world = resolve(env, **given)
    assert (numbers(world)[:4], world.launcher) == (expected, launcher)


@pytest.mark.parametrize(
    ("env", "given"),
    [
        ({}, {"rank": 0}),
        ({}, {"world_size": 2}),
        ({}, {"local_rank": 0}),
        ({}, {"rank": -1, "world_size": 2}),
        ({}, {"rank": 2, "world_size": 2}),
        ({}, {"rank": True, "world_size": 2}),
        ({}, {"rank": 0.0, "world_size": 2}),
        ({}, {"local_rank": 2, "local_world_size": 2}),
        (TORCHRUN, {"local_rank": 0, "local_world_size": 4}),
        (STEP_2X2, {"local_rank": 1, "local_world_size": 2}),
        (OPENMPI_2X2, {"local_rank": 0, "local_world_size": 2}),
    ],
    ids=str,
)
def test_given_wrong(env: dict[str, str], given: dict[str, Any]) -> None:
    with pytest.raises(WorldError):
        resolve(env, **given)


def test_all_tasks_of_a_step_make_one_world() -> None:
    """tasks x spawned: every rank once, all at one place."""
    seen = []
    for task in range(2):
        env = ONE_PER_NODE | {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}
        for index in range(3):
            world = resolve(env, local_rank=index, local_world_size=3)
            seen.append((world.rank, world.world_size, world.node_rank, world.master_addr, world.master_port))
    assert [entry[:3] for entry in seen] == [(0, 6, 0), (1, 6, 0), (2, 6, 0), (3, 6, 1), (4, 6, 1), (5, 6, 1)]
    assert len({entry[3:] for entry in seen}) == 1


def test_world_is_frozen_and_plain() -> None:
    world = resolve(TORCHRUN)
    with pytest.raises(AttributeError):
        world.rank = 1  # type: ignore[misc]
    assert set(world.as_json()) == {
        "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_addr", "master_port",
        "init_method", "launcher", "job_id", "evidence",
    }  # fmt: skip


def test_the_environment_is_only_read() -> None:
    env = dict(STEP_2X2)
    resolve(env)
    assert env == STEP_2X2
