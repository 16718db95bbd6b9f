"""From all readings to one World: the order of evidence.

1. What the caller gives (`rank` and `world_size`).
2. RANK and WORLD_SIZE with TORCHELASTIC_RUN_ID: `instep run` or torchrun started this very process. Whatever Slurm
   and MPI say then is about the process that started it.
3. RANK and WORLD_SIZE alone, mpirun's variables, a Slurm step. They have to agree: the same rank of the same world,
   or one inside the other (srun starts one process per node, mpirun or mp.spawn more on it). Else an error shows both.
4. Alone - but never next to variables of a launcher that give no usable rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from instep.errors import WorldError
from instep.world import meeting
from instep.world.launchers import mpi, slurm, torchrun
from instep.world.reading import Reading, Refusal, check
from instep.world.record import Evidence, World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def resolve(
    env: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    init_method: str | None = None,
    local_rank_argument: int | None = None,
    ephemeral: tuple[int, int] = (32_768, 60_999),
) -> World:
    """Who this process is: a pure function of its arguments.

    Args:
        env: the environment.
        rank: given by the caller, with `world_size`: overrules the environment.
        world_size: see `rank`.
        local_rank: given by the caller, with `local_world_size`, but without `rank`: this process is number
            `local_rank` of the `local_world_size` that one task of the launcher has spawned, so the world is
            tasks x spawned.
        local_world_size: see `local_rank`.
        init_method: where to meet, if the caller says so: ``tcp://HOST:PORT``, ``file:///PATH``, ``env://``.
        local_rank_argument: what torch.distributed.launch added to the script's arguments.
        ephemeral: the kernel's range (first, last) of ports for outgoing connections.

    Raises:
        WorldError: no usable answer, or two that conflict.
        JoinError: `init_method` is no place to meet.

    """
    numbers = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    _check_given(given)
    if rank is not None and world_size is not None:
        reading = _given(env, given)
    else:
        reading = _from_environment(env, local_rank_argument)
        if local_rank is not None and local_world_size is not None:
            reading = _spawned(reading, local_rank, local_world_size)
    place = meeting.find(env, reading, init_method, ephemeral)
    if reading.local_rank is None and meeting.is_loopback(place.master_addr):
        reading = _all_here(reading, place.master_addr)
    return World(
        rank=reading.rank,
        world_size=reading.world_size,
        local_rank=reading.local_rank,
        local_world_size=reading.local_world_size,
        node_rank=reading.node_rank,
        num_nodes=reading.num_nodes,
        master_addr=place.master_addr,
        master_port=place.master_port,
        init_method=place.init_method,
        launcher=reading.launcher,
        job_id=reading.job_id,
        evidence=tuple(entry for entry in reading.evidence if entry.field != "master_addr") + place.evidence,
    )


def _check_given(given: Mapping[str, int]) -> None:
    for name, value in given.items():
        least = 0 if name.endswith("rank") else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise WorldError(
                f"{name} has to be a whole number of at least {least}.",
                evidence=[f"{name}={value!r} was given"],
            )
    for one, other in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if (one in given) != (other in given) and not (one == "local_rank" and "rank" in given):
            raise WorldError(
                f"{one} and {other} belong together.",
                evidence=[f"{name}={value} was given" for name, value in given.items()],
                cure=f"Give both:  instep.init({one}=..., {other}=...)",
            )


def _given(env: Mapping[str, str], given: Mapping[str, int]) -> Reading:
    """What the caller said; a world of one is all on this machine."""
    values: dict[str, Any] = dict(given)
    if values["world_size"] == 1:
        values = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1, **values}
    evidence = [Evidence(name, f"{name}={value}", "given") for name, value in given.items()]
    evidence += [Evidence(name, "", "a world of one") for name in values if name not in given]
    evidence.append(Evidence("launcher", "rank and world_size", "given"))
    job = env.get("SLURM_JOB_ID", "")
    return check(Reading(launcher="given", **values, job_id=job, evidence=tuple(evidence)))


def _from_environment(env: Mapping[str, str], local_rank_argument: int | None) -> Reading:
    found = (torchrun.read(env, local_rank_argument), mpi.read(env), slurm.read(env))
    readings = [item for item in found if isinstance(item, Reading)]
    refusals = [item for item in found if isinstance(item, Refusal)]
    if readings and readings[0].final:
        return readings[0]
    if refusals and isinstance(found[0], Refusal) and readings:
        # RANK or WORLD_SIZE alone, beside a launcher that knows both: fine if it says the same.
        _compare_half(env, readings[0])
    elif refusals and not readings:
        raise refusals[0].error
    if not readings:
        return _alone(env)
    inner = readings[0]
    for other in readings[1:]:
        inner = _agree(inner, other)
    return inner


def _compare_half(env: Mapping[str, str], reading: Reading) -> None:
    for name, value in (("RANK", reading.rank), ("WORLD_SIZE", reading.world_size)):
        text = env.get(name)
        if text and text.strip() != str(value):
            raise _conflict([f"environment: {name}={text}", reading.said()])


def _agree(inner: Reading, outer: Reading) -> Reading:
    """The one of two readings that is about this very process, completed by the other.

    Raises:
        WorldError: they conflict.

    """
    if (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        for field in ("local_rank", "local_world_size", "node_rank"):
            one, other = getattr(inner, field), getattr(outer, field)
            if one is not None and other is not None and one != other:
                raise _conflict([f"{side.said()}; {field} {getattr(side, field)}" for side in (inner, outer)])
        # The scheduler knows most: node, job, main host. The values are equal, so is what they came from.
        missing = {
            name: getattr(inner, name)
            for name in ("local_rank", "local_world_size", "node_rank", "num_nodes", "master_addr")
            if getattr(outer, name) is None
        }
        extra = tuple(entry for entry in inner.evidence if entry.field in ("rank", "world_size", *missing))
        return replace(outer, **missing, evidence=outer.evidence + extra)
    if _contains(outer, inner):
        if inner.launcher != "environment":
            return inner  # the daemons' step need not hold the main rank's host: see meeting.find
        where = tuple(entry for entry in outer.evidence if entry.field == "master_addr")
        return replace(inner, master_addr=outer.master_addr, evidence=inner.evidence + where)
    raise _conflict([inner.said(), outer.said()])


def _contains(outer: Reading, inner: Reading) -> bool:
    """Whether the outer launcher started what started this process, as far as the numbers can tell.

    Inside an allocation mpirun has srun start one daemon on each node, and the ranks inherit that step's variables:
    they count daemons, not ranks. A hand-set RANK, on the other hand, has to lie in the block of its task.
    """
    if inner.launcher != "environment":
        return outer.world_size in (outer.num_nodes, 1)
    spawned, rest = divmod(inner.world_size, outer.world_size)
    return spawned > 1 and rest == 0 and inner.rank // spawned == outer.rank


def _conflict(readings: Sequence[str]) -> WorldError:
    return WorldError(
        "Two launchers say different things about who this process is.",
        evidence=readings,
        cure="Unset the variables of the one that did not start this process (leftovers of another job, or an export "
        "in the job script),\nor say it yourself:  instep.init(rank=..., world_size=...)",
    )


def _alone(env: Mapping[str, str]) -> Reading:
    note = "no variable of any launcher is set"
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    if job:
        note = f"Slurm job {job} has one task, and this process is in it"
    fields = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    evidence = [Evidence("launcher", "", note), *(Evidence(field, "", "alone") for field in fields)]
    return Reading("alone", 0, 1, 0, 1, 0, 1, job_id=job, evidence=tuple(evidence))


def _spawned(task: Reading, index: int, count: int) -> Reading:
    """Number `index` of the `count` processes that a task of the launcher has spawned."""
    here = (task.local_rank, task.local_world_size)
    if task.final:
        if here != (index, count):
            raise _conflict([f"given: local_rank {index} of {count}", f"{task.said()}; local {here[0]} of {here[1]}"])
        return task
    if here == (index, count) and count > 1:
        raise WorldError(
            "It is not clear whether this process is a task of the launcher or one that a task has spawned.",
            evidence=[
                f"given: local_rank {index} of {count}",
                f"{task.said()}; local_rank {here[0]} of {here[1]}",
            ],
            cure="A task:     instep.init()\na spawned one:  instep.init(rank=..., world_size=...)",
        )
    changes: dict[str, Any] = {
        "rank": task.rank * count + index,
        "world_size": task.world_size * count,
        "local_rank": None if task.local_rank is None else task.local_rank * count + index,
        "local_world_size": None if task.local_world_size is None else task.local_world_size * count,
    }
    if task.launcher == "alone":
        words = f"spawned {index} of {count}"
    else:
        words = f"task {task.rank} of {task.world_size}, spawned {index} of {count}"
    kept = tuple(entry for entry in task.evidence if entry.field not in changes)
    evidence = kept + tuple(Evidence(name, f"local_rank={index}, local_world_size={count}", words) for name in changes)
    launcher = "spawn" if task.launcher == "alone" else task.launcher
    return check(replace(task, launcher=launcher, **changes, evidence=evidence))


def _all_here(reading: Reading, master_addr: str) -> Reading:
    """The same reading, where ranks that meet on a loopback address have to be on one machine."""
    values: dict[str, Any] = {
        "local_rank": reading.rank,
        "local_world_size": reading.world_size,
        "node_rank": 0,
        "num_nodes": 1,
    }
    evidence = tuple(Evidence(name, "", f"ranks that meet on {master_addr} are on one machine") for name in values)
    kept = tuple(entry for entry in reading.evidence if entry.field not in values)
    return check(replace(reading, **values, evidence=kept + evidence))
