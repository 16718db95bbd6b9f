"""The same weights on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from instep.comm import Session


def share(model: nn.Module, session: Session) -> None:
    """Give every rank the main rank's parameters and buffers."""
    _broadcast([*model.parameters(), *model.buffers()], session)


def share_buffers(model: nn.Module, session: Session) -> None:
    """Give every rank the main rank's buffers: the running means of BatchNorm differ between ranks.

    DDP does the same before each of its forward passes, so training does not notice.
    """
    _broadcast(list(model.buffers()), session)


def _broadcast(tensors: list[torch.Tensor], session: Session) -> None:
    if session.world_size == 1:
        return
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.data.contiguous()
            dist.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
