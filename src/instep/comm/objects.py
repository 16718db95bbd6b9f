"""Python objects between ranks."""

from __future__ import annotations

from typing import TypeVar

from instep.comm.session import together

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """The value of every rank, in rank order, on every rank.

    Args:
        value: anything that pickle takes; small, since every rank receives all.

    Raises:
        StepError: the ranks have not joined.

    """
    session = together("gather_objects")
    if session.world_size == 1:
        return [value]
    import torch.distributed as dist

    values: list[T | None] = [None] * session.world_size
    dist.all_gather_object(values, value, group=session.group)
    return values  # type: ignore[return-value]  # every place has been filled


def broadcast_object(value: T, source: int = 0) -> T:
    """The value of one rank, on every rank.

    Args:
        value: anything that pickle takes; that of the ranks other than `source` is not used.
        source: the rank whose value it is.

    Raises:
        StepError: the ranks have not joined, or there is no such rank.

    """
    session = together("broadcast_object")
    if not 0 <= source < session.world_size:
        from instep.errors import StepError

        raise StepError(f"There is no rank {source} in a world of {session.world_size}.")
    if session.world_size == 1:
        return value
    import torch.distributed as dist

    values = [value if session.rank == source else None]
    dist.broadcast_object_list(values, src=source, group=session.group)
    return values[0]  # type: ignore[return-value]  # the source's value
