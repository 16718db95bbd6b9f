"""Which device this rank takes, and what carries its collectives. All lines about CUDA that joining needs are here."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from instep.errors import JoinError

if TYPE_CHECKING:
    import torch

    from instep.world import World


def choose(device: str | torch.device | None, world: World) -> torch.device:
    """The device of this rank: what the caller says, else its GPU, else the CPU.

    Where a rank sees one GPU only (Slurm's --gpus-per-task), it is that one, whatever the local rank.

    Raises:
        JoinError: a GPU is asked for and there is none, or none for this local rank; or torch knows no such device.

    """
    import torch

    try:
        wanted = torch.device(device) if device is not None else None
    except (RuntimeError, TypeError) as error:
        raise JoinError(
            "torch knows no such device.",
            evidence=[f"device={device!r}", str(error).splitlines()[0]],
            cure="'cpu', 'cuda'",
        ) from None
    if wanted is not None and wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count()
    if wanted is None and count == 0:
        return torch.device("cpu")
    index = wanted.index if wanted is not None else None
    if index is None:
        index = 0 if count == 1 else world.local_rank
    if index is None:
        raise JoinError(
            f"Which of the {count} GPUs is this rank's? Its local rank is not known.",
            evidence=[f"{world.launcher}: rank {world.rank} of {world.world_size}"],
            cure="Export LOCAL_RANK, or say it:  instep.init(device='cuda:0')",
        )
    if index >= count:
        raise JoinError(
            f"Local rank {world.local_rank} has no GPU: {socket.gethostname()} shows {count}.",
            evidence=[f"torch.cuda.device_count() = {count}", f"local_rank: {world.why('local_rank')}"],
            cure="Start at most as many ranks on a node as it has GPUs, or use the CPU: instep.init(device='cpu').",
        )
    return torch.device("cuda", index)


def bind(device: torch.device) -> str:
    """Make the device this process's own, before any collective; a GPU's name that no other one in the world has."""
    if device.type != "cuda":
        return ""
    import torch

    torch.cuda.set_device(device)
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def backend_for(backend: str | None, device: torch.device) -> str:
    """Torch's name for what carries the collectives: gloo for CPU tensors, NCCL beside it for those on a GPU.

    Raises:
        JoinError: NCCL is asked for on the CPU, or a backend that torch does not know.

    """
    if backend is None:
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    import torch.distributed as dist

    for name in (part.rpartition(":")[2].lower() for part in backend.split(",")):
        if name not in dist.Backend.backend_list:
            raise JoinError(
                f"torch knows no backend {name!r}.",
                evidence=[f"backend={backend!r}"],
                cure=f"One of {', '.join(dist.Backend.backend_list[1:])}, or none: it is chosen by the device.",
            )
    if "nccl" in backend and device.type != "cuda":
        raise JoinError(
            "NCCL carries the tensors of NVIDIA GPUs only, and this rank has none.",
            evidence=[f"backend={backend!r}", f"device={str(device)!r}"],
            cure="instep.init(backend='gloo'), or leave the backend out: it is chosen by the device.",
        )
    # A GPU's rank also keeps gloo, for the small things that live on the CPU (agree, mean, gather_objects).
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
