"""Rows of all ranks brought together in dataset order, as the bytes of tensors: no pickling, no padding."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.comm.session import together
from instep.train.trees import Column, Items, Rows, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.comm import Session
    from instep.train.failures import Caught


@dataclass(frozen=True)
class Dealing:
    """How a loader deals out the order: the inverse of :class:`instep.data.partition.Partition`.

    Attributes:
        world_size: number of ranks.
        block: units in a full global batch.
        shared: False where every rank has data of its own.

    """

    world_size: int
    block: int
    shared: bool = True

    def positions(self, rank: int, units: int) -> Tensor:
        """Where in the order of all ranks the units of one rank are: int64, one for each unit."""
        places = torch.arange(units)
        part = len(range(rank, self.block, self.world_size))  # what it takes of a full global batch
        if part == 0:
            assert units == 0
            return places
        return places // part * self.block + rank + places % part * self.world_size

    def of_batches(self) -> Dealing:
        """The same for batches in place of samples: each global batch has one for each rank."""
        return Dealing(self.world_size, self.world_size, self.shared)

    def order(self, units: Sequence[Sequence[int]]) -> Tensor | None:
        """How the rows of all ranks, one rank below the other, are put in dataset order.

        Args:
            units: of each rank, how many rows each of its units has.

        Returns:
            Indices into those rows; None: they are in order.

        """
        if not self.shared or len(units) == 1:
            return None
        pairs = [
            (self.positions(rank, len(mine)), torch.tensor(mine, dtype=torch.int64)) for rank, mine in enumerate(units)
        ]
        keys = torch.cat([torch.repeat_interleave(positions, mine) for positions, mine in pairs])
        return torch.argsort(keys, stable=True)


def gather(
    mine: Sequence[Column], specs: Sequence[Rows | Items], to: int | None, caught: Caught[Any]
) -> list[Column] | None:
    """The columns of all ranks, one rank below the other.

    Args:
        mine: this rank's; without meaning where this rank has failed.
        specs: what they are, the same on every rank.
        to: the rank that gets them; None: every rank.
        caught: tells the others if something cannot be sent.

    Returns:
        None on a rank that does not get them.

    """
    session = together("gather")
    if session.world_size == 1:
        caught.exchange()
        return list(mine)
    packed: list[Tensor] = []
    with caught:
        if not caught.failed:
            packed = [_pack(column) for column in mine]
    sizes = caught.exchange([(len(one), len(column)) for one, column in zip(packed, mine, strict=True)])
    gathered: list[Column] = []
    for number, spec in enumerate(specs):
        parts = _exchange(packed[number], [size[number][0] for size in sizes], to, session)
        if parts is not None:
            lengths = [size[number][1] for size in sizes]
            gathered.append(join([_unpack(*one, spec) for one in zip(parts, lengths, strict=True)], spec))
    return gathered if to is None or to == session.rank else None


def _pack(column: Column) -> Tensor:
    """Its bytes: a process group takes those, whatever the dtype is."""
    if isinstance(column, Tensor):
        return (
            column.contiguous().reshape(-1).view(torch.uint8) if column.numel() else torch.empty(0, dtype=torch.uint8)
        )
    return torch.frombuffer(bytearray(pickle.dumps(column)), dtype=torch.uint8)


def _unpack(packed: Tensor, length: int, spec: Rows | Items) -> Column:
    if isinstance(spec, Items):
        items: list[Any] = pickle.loads(packed.numpy().tobytes())  # noqa: S301  # from ranks of this program
        return items
    return packed.view(spec.dtype).reshape(length, *spec.shape)


def _exchange(mine: Tensor, sizes: Sequence[int], to: int | None, session: Session) -> list[Tensor] | None:
    """The bytes of every rank; nobody gets or sends more than there is."""
    import torch.distributed as dist

    if to is not None and to != session.rank:
        if len(mine):
            dist.send(mine, dst=to, group=session.group)
        return None
    parts = [mine if rank == session.rank else torch.empty(size, dtype=torch.uint8) for rank, size in enumerate(sizes)]
    for rank, part in enumerate(parts):
        if not len(part):
            continue
        if to is None:
            dist.broadcast(part, src=rank, group=session.group)
        elif rank != session.rank:
            dist.recv(part, src=rank, group=session.group)
    return parts
