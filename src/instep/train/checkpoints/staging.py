"""Copies of the tensors that the background may write while training changes the originals.

torch has stagers of its own, but the one that keeps its buffers pins memory even where there is no GPU, and the other
one is not in torch 2.6. Both copy by ``copy_``, whose threads wait for each other: on a busy machine that took seven
times as long as the pool here, in which a thread that is held up holds up nobody else.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_THREADS = 4  # at most; memory is no faster with more
_SMALL = 64 << 10  # bytes: not worth a thread
_PIECE = 4 << 20  # bytes that a thread takes at a time
_Piece = tuple[int, int, int]  # to, from, bytes


class Staging:
    """Buffers on the CPU, made once for each tensor (page-locked for those of a GPU) and used again by each save.

    New memory costs more than the copy (the kernel has to clear each page), so that the first use is the slow one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU. The copies before this one are overwritten."""
        import torch

        for key in self._buffers.keys() - tensors.keys():
            del self._buffers[key]
        pieces: list[_Piece] = []
        with torch.no_grad():
            for key, one in tensors.items():
                buffer = self._buffers.get(key)
                if buffer is None or not _fits(buffer, one):
                    buffer = self._buffers[key] = _buffer_for(one)
                to, source = _local(buffer), _local(one)
                if source.nbytes <= _SMALL or not _same_bytes(to, source):
                    to.copy_(source, non_blocking=True)
                else:
                    pieces += _pieces(to, source)
        if pieces:
            self._move(pieces)
        if any(one.is_cuda for one in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._buffers)

    def close(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _move(self, pieces: list[_Piece]) -> None:
        if self._pool is None:
            threads = min(_THREADS, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="instep staging")
        for _ in self._pool.map(_move, pieces):
            pass


def _move(piece: _Piece) -> None:
    ctypes.memmove(*piece)  # without Python's lock


def _same_bytes(to: Tensor, source: Tensor) -> bool:
    """Whether a copy of the bytes is a copy of the tensor."""
    plain = source.device.type == "cpu" and source.is_contiguous() and to.is_contiguous()
    return plain and not source.is_conj() and not source.is_neg()


def _pieces(to: Tensor, source: Tensor) -> list[_Piece]:
    size, begin_to, begin = source.nbytes, to.data_ptr(), source.data_ptr()
    return [(begin_to + at, begin + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]


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
