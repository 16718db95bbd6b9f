"""Which rank stages and writes which tensor.

A tensor that every rank has whole (under DDP: all of them) is copied and written by one rank only: with N ranks each
holds its training thread for, and keeps in memory, an N-th of the state.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

Sizes = dict[str, int]  # bytes of each tensor that this rank has whole


def whole_sizes(tensors: Mapping[str, Tensor]) -> Sizes:
    """The bytes of each tensor that is no part of a bigger one over several ranks."""
    from torch.distributed.tensor import DTensor

    return {key: one.numel() * one.element_size() for key, one in tensors.items() if not isinstance(one, DTensor)}


def signature(tensors: Mapping[str, Tensor]) -> str:
    """Equal for equal keys, shapes, dtypes and devices."""
    lines = (f"{key}|{tuple(one.shape)}|{one.dtype}|{one.device}|{type(one).__name__}" for key, one in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def divide(of_ranks: Sequence[Sizes]) -> list[set[str]]:
    """The keys of the whole tensors that each rank writes: each one once, the bytes evenly.

    Args:
        of_ranks: what each rank has.

    """
    owners: dict[str, list[int]] = {}
    for rank, sizes in enumerate(of_ranks):
        for key in sizes:
            owners.setdefault(key, []).append(rank)
    loads = [0] * len(of_ranks)
    shares: list[set[str]] = [set() for _ in of_ranks]
    # The big ones first, each to the rank with the least so far: at most a third above the best division.
    for key in sorted(owners, key=lambda key: (-of_ranks[owners[key][0]][key], key)):
        rank = min(owners[key], key=lambda rank: (loads[rank], rank))
        shares[rank].add(key)
        loads[rank] += of_ranks[rank][key]
    return shares
