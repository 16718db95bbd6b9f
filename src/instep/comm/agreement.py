"""Decisions that all ranks share."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar, get_args

from instep.comm.objects import broadcast_object, gather_objects
from instep.comm.session import together
from instep.errors import StepError

T = TypeVar("T")
How = Literal["any", "all", "min", "max", "main"]


def agree(value: T, how: How = "main") -> T:
    """One value for all ranks, where each may have come with another.

    ::

        # wrong: a rank whose loss is not finite leaves the loop alone, and the others wait for it
        if not torch.isfinite(loss): continue
        # right: all ranks skip the step, or none
        if instep.agree(not torch.isfinite(loss), how="any"): continue

    Args:
        value: a truth value for ``any`` and ``all``; a number (or anything that has an order) for ``min`` and ``max``;
            anything that pickle takes for ``main``.
        how: ``any``: true if it is on one rank or more; ``all``: true if it is on every rank; ``min``, ``max``: the
            least and the greatest (NaN if any rank has NaN); ``main``: the main rank's.

    Raises:
        StepError: the ranks have not joined, or `how` is none of these.

    """
    if how not in get_args(How):
        raise StepError(
            f"agree() does not know how={how!r}.", cure=f"Give one of {', '.join(map(repr, get_args(How)))}."
        )
    if how == "main":
        return broadcast_object(value)
    if how in ("any", "all"):
        return _truth(bool(value), how)  # type: ignore[return-value]  # bool in, bool out
    values: list[Any] = gather_objects(value)
    nan = [one for one in values if isinstance(one, float) and math.isnan(one)]
    chosen: Any = nan[0] if nan else min(values) if how == "min" else max(values)
    return chosen  # type: ignore[no-any-return]  # one of the ranks' values


def _truth(value: bool, how: str) -> bool:
    session = together("agree")
    if session.world_size == 1:
        return value
    import torch
    import torch.distributed as dist

    # One small integer: cheap enough to ask at every step.
    flag = torch.tensor([int(value)], dtype=torch.int64)
    dist.all_reduce(flag, dist.ReduceOp.MAX if how == "any" else dist.ReduceOp.MIN, group=session.group)
    return bool(flag.item())
