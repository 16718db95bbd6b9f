"""Copies of the tensors that the background may write while training changes the originals.

torch has stagers of its own, but the one that keeps its buffers pins memory even where there is no GPU, and the other
one is not in torch 2.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class Staging:
    """Buffers on the CPU, made once for each tensor (page-locked for those of a GPU) and used again by each save.

    New memory costs more than the copy (the kernel has to clear each page), so that the first use is the slow one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU. The copies before this one are overwritten."""
        import torch

        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        with torch.no_grad():
            for key, one in tensors.items():
                buffer = self._buffers.get(key)
                if buffer is None or not _fits(buffer, one):
                    buffer = self._buffers[key] = _buffer_for(one)
                _local(buffer).copy_(_local(one), non_blocking=True)
        if any(one.is_cuda for one in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._buffers)


def _fits(buffer: Tensor, one: Tensor) -> bool:
    same = buffer.shape == one.shape and buffer.dtype == one.dtype and type(buffer) is type(one.detach())
    return same and _local(buffer).shape == _local(one).shape and _placed(buffer) == _placed(one)


def _placed(one: Tensor) -> object:
    return getattr(one, "placements", None), getattr(one, "device_mesh", None)


def _buffer_for(one: Tensor) -> Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(one, DTensor):
        return torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda)
    # A part of a bigger tensor stays one, with its part of the data on the CPU.
    buffer: Tensor = one.detach().to("cpu", copy=True)
    assert isinstance(buffer, DTensor)  # a copy of one
    if one.is_cuda and buffer._local_tensor.numel():  # noqa: SLF001  # torch's own staging does it the same way
        buffer._local_tensor = buffer._local_tensor.pin_memory()  # noqa: SLF001
    return buffer


def _local(one: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    one = one.detach()
    return one.to_local() if isinstance(one, DTensor) else one
