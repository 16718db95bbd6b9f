"""Gradients compressed on their way between ranks: torch's own communication hooks for DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from instep.errors import TrainError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from instep.comm import Session

Hook = Literal["fp16", "bf16", "powersgd"]


def backend_of(session: Session) -> str:
    """What carries tensors of the session's device: the cuda part of ``cpu:gloo,cuda:nccl``."""
    parts = dict(part.split(":") for part in session.backend.split(",") if ":" in part)
    return parts.get(session.device.type, session.backend)


def check_hook(hook: str | None, session: Session, *, start: int) -> None:
    """Refuse a hook before training.

    Args:
        hook: its name, None for none.
        session: the world.
        start: the step at which PowerSGD is to begin.

    Raises:
        TrainError: there is no such hook, or the backend cannot do it.

    """
    if hook is not None and hook not in get_args(Hook):
        raise TrainError(
            f"There is no communication hook {hook!r}.", cure=f"One of {', '.join(map(repr, get_args(Hook)))}, or None."
        )
    if hook == "powersgd" and start < 2:
        raise TrainError(
            "PowerSGD cannot begin before the second step: DDP lays out its buckets anew after the first.",
            evidence=[f"powersgd_start={start}"],
            cure="powersgd_start=2 or more",
        )
    backend = backend_of(session)
    if hook == "bf16" and backend == "gloo":
        raise TrainError(
            "gloo cannot sum bf16 gradients: the hook comm_hook='bf16' needs NCCL.",
            evidence=[f"backend: {session.backend}", f"device: {session.device}"],
            cure="comm_hook='fp16', or none on the CPU.",
        )


def register(hook: str | None, wrapped: DistributedDataParallel, *, rank: int, start: int) -> None:
    """Let DDP send its buckets through the hook.

    Args:
        hook: its name, None for none.
        wrapped: before its first forward pass.
        rank: of the matrices of PowerSGD.
        start: the step at which PowerSGD begins.

    """
    if hook is None:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as powersgd

    if hook == "powersgd":
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
    else:
        stock = default_hooks.fp16_compress_hook if hook == "fp16" else default_hooks.bf16_compress_hook
        wrapped.register_comm_hook(None, stock)
