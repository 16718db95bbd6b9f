"""Join the world."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from instep.comm import devices, guarding, interfaces, rollcall, stores
from instep.comm.leave import leave_at_exit
from instep.comm.session import Session, get_session, initialized_dist, set_session
from instep.errors import JoinError, speak_plainly
from instep.world import Evidence, World, detect

if TYPE_CHECKING:
    import torch

_leaves_at_exit = False


def init(
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float = 600.0,
    guard: bool = False,
) -> Session:
    """Join the other ranks: ``torch.distributed`` is initialised afterwards.

    ::

        with instep.init() as session:
            model = DistributedDataParallel(model.to(session.device))

    Call it before the script parses its arguments: it takes out the ``--local-rank=N`` that torch.distributed.launch
    adds to them.

    Args:
        init_method: where to meet: ``tcp://HOST:PORT``, ``file:///PATH`` (a path that all ranks see and that does not
            exist yet), or ``env://``. None: where the launcher says, or at the main rank's machine.
        rank: with `world_size`, overrules what the launcher says (``torch.multiprocessing.spawn``).
        world_size: see `rank`.
        local_rank: with `local_world_size` and without `rank`: the number of this process among those that one task
            of the launcher has spawned; the world is then tasks x spawned.
        local_world_size: see `local_rank`.
        backend: torch's name, such as ``gloo``. None: by the device, ``gloo`` or ``cpu:gloo,cuda:nccl``.
        device: None: the GPU of this local rank, or the CPU where there is none.
        timeout: how long a rank waits for the others, in seconds: now, and in each collective afterwards.
        guard: watch the ranks: those that fall out of step are named with the line where they left the common path,
            and the job ends with exit code 86. For jobs that srun, mpirun or torchrun starts: one small process on
            each node looks at the ranks from outside. ``instep run`` watches anyway. True on one rank is enough.

    Returns:
        The session: who this rank is, its device; a context manager that leaves in the end.

    Raises:
        WorldError: the environment gives no usable rank, or two that conflict.
        JoinError: the ranks did not meet: who came, who did not, where this one looked, what to try.

    """
    global _leaves_at_exit  # noqa: PLW0603  # one process, one hook
    world = detect(
        init_method, rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    _check_state(timeout)
    if world.local_rank is not None:  # wrong wishes are told before anybody waits for anybody
        devices.backend_for(backend, devices.choose(device, world))
    session = _join(world, backend, device, float(timeout), guard=guard)
    set_session(session)
    speak_plainly()
    if not _leaves_at_exit:
        atexit.register(leave_at_exit)
        _leaves_at_exit = True
    return session


def _check_state(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise JoinError(
            "timeout is a number of seconds greater than 0.", evidence=[f"timeout={timeout!r}"], cure="timeout=600"
        )
    if get_session() is not None:
        raise JoinError("This process has joined already.", cure="Leave first:  instep.close()")
    if initialized_dist() is not None:
        raise JoinError(
            "torch.distributed is initialised already.",
            cure="Take out init_process_group(): instep.init() calls it. Or keep it, and leave out instep.init(): "
            "agree, mean, shard and the other pieces work over it.",
        )


def _join(
    world: World, backend: str | None, device: str | torch.device | None, timeout: float, *, guard: bool
) -> Session:
    """Meet, take a device, and make the process group. A world of one gets one too, so that DDP works there."""
    import torch.distributed as dist

    store: dist.Store
    if world.world_size == 1:
        store, serves = dist.HashStore(), False
    else:
        store, serves = stores.open_store(world, timeout)
    address = interfaces.address_towards(world.master_addr, world.master_port) if world.master_addr else ""
    reports = rollcall.call(store, rollcall.report(world, address, guard=guard), timeout)
    world = _with_interface(rollcall.complete(world, reports), reports)
    chosen = devices.choose(device, world)
    carrier = devices.backend_for(backend, chosen)
    identity = devices.bind(chosen)
    if "nccl" in carrier:  # gloo does not mind ranks that share a GPU
        rollcall.check_devices(store, reports, world.rank, identity, timeout)
    guarding.begin(world, reports, store, timeout)
    dist.init_process_group(
        carrier,
        store=dist.PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=chosen if chosen.type == "cuda" else None,
    )
    return Session(
        world=world,
        device=chosen,
        backend=carrier,
        timeout=timeout,
        store=dist.PrefixStore("step", store),
        hosts=tuple(entry.host for entry in reports),
        leaves_last=serves or (world.is_main and world.init_method.startswith("file://")),
    )


def _with_interface(world: World, reports: list[rollcall.Report]) -> World:
    interfaces.bind(reports, world.rank, os.environ)
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    note = f"GLOO_SOCKET_IFNAME={name}" if name else "gloo's own choice of interface"
    return world.with_facts(Evidence("interface", note))
