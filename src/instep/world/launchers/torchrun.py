"""RANK, WORLD_SIZE and company: `instep run`, torchrun, torch.distributed.launch, or set by hand.

Source: ``torch/distributed/run.py`` (section "Environment Variables") and
``torch/distributed/elastic/agent/server/local_elastic_agent.py`` of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import WorldError
from instep.world.reading import Reading, Refusal, Variables, check, node_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def read(env: Mapping[str, str], local_rank_argument: int | None = None) -> Reading | Refusal | None:
    """What RANK, WORLD_SIZE and company say.

    Args:
        env: the environment.
        local_rank_argument: N of ``--local-rank=N``, which torch.distributed.launch adds to the script's arguments.

    """
    if not (env.get("RANK") or env.get("WORLD_SIZE") or env.get("TORCHELASTIC_RUN_ID")):
        return None
    variables = Variables(env)
    rank = variables.number("rank", "RANK")
    world_size = variables.number("world_size", "WORLD_SIZE", least=1)
    if rank is None or world_size is None:
        return Refusal("environment", _half(env, "RANK" if rank is None else "WORLD_SIZE"))
    launcher, agent = _launcher(env, local_rank_argument)
    local_rank = variables.number("local_rank", "LOCAL_RANK")
    if local_rank is None and local_rank_argument is not None:
        local_rank = local_rank_argument
        variables.because("local_rank", f"--local-rank={local_rank}", "argument of torch.distributed.launch")
    local_world_size = variables.number("local_world_size", "LOCAL_WORLD_SIZE", least=1)
    node_rank = variables.number("node_rank", "GROUP_RANK", "NODE_RANK")
    num_nodes = variables.number("num_nodes", "GROUP_WORLD_SIZE", "NNODES", least=1)
    if num_nodes is None and local_world_size is not None and world_size % local_world_size == 0:
        num_nodes = world_size // local_world_size
        variables.because("num_nodes", "", f"if every node has {local_world_size} ranks, as this one")
    if node_rank is None and None not in (local_rank, local_world_size, num_nodes):
        node_rank = node_of(rank, local_rank, local_world_size, num_nodes)  # type: ignore[arg-type]  # just tested
        variables.because("node_rank", "", "from the numbers above")
    job_id = variables.text("job_id", "TORCHELASTIC_RUN_ID") or ""
    variables.because("launcher", *agent)
    return check(
        Reading(
            launcher=launcher,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            job_id=job_id,
            final="TORCHELASTIC_RUN_ID" in env,
            evidence=variables.evidence,
        )
    )


def _launcher(env: Mapping[str, str], local_rank_argument: int | None) -> tuple[str, tuple[str, str]]:
    """The launcher's name, and (source, note) of the evidence for it."""
    run_id = env.get("TORCHELASTIC_RUN_ID")
    job = env.get("INSTEP_JOB")
    # A rank of `instep run` may itself call torchrun: then the run id is no longer that of its own job.
    if job is not None and job == run_id:
        return "instep run", (f"INSTEP_JOB={job}", "")
    if local_rank_argument is not None:
        return "torch.distributed.launch", (f"--local-rank={local_rank_argument}", "argument of the script")
    if run_id is not None:
        return "torchrun", (f"TORCHELASTIC_RUN_ID={run_id}", "")
    return "environment", ("RANK and WORLD_SIZE", "no launcher left its name beside them")


def _half(env: Mapping[str, str], missing: str) -> WorldError:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    there = [name for name in names if env.get(name)]
    return WorldError(
        f"{missing} is not set, though {' and '.join(there)} {'is' if len(there) == 1 else 'are'}.",
        evidence=[f"{name}={env[name]}" for name in there],
        cure="Let a launcher set them all:  instep run --nproc 2 train.py\n"
        f"or set {missing} too, or, for one process alone:  unset {' '.join(there)}",
    )
