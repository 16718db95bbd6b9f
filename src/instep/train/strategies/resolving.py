"""From what the user says to a strategy."""

from __future__ import annotations

from instep.errors import TrainError
from instep.train.strategies.base import Single, Strategy
from instep.train.strategies.ddp import DDP
from instep.train.strategies.fsdp import FSDP, HSDP
from instep.train.strategies.zero1 import Zero1

NAMED: dict[str, type[Strategy]] = {one.name: one for one in (DDP, Zero1, FSDP, HSDP)}


def resolve(strategy: str | Strategy, world_size: int) -> Strategy:
    """The strategy of that name, or the one given; in a world of one always :class:`Single`.

    Args:
        strategy: ``"ddp"``, ``"zero1"``, ``"fsdp"`` or ``"hsdp"``, or an instance with options of your own.
        world_size: how many ranks train.

    Raises:
        TrainError: there is no such strategy.

    """
    if not isinstance(strategy, Strategy) and strategy not in NAMED:
        raise TrainError(
            f"There is no strategy {strategy!r}.",
            cure=f"One of {', '.join(map(repr, NAMED))}, or one with options: instep.train.DDP(bucket_mb=50)",
        )
    if world_size == 1:
        return Single()
    return strategy if isinstance(strategy, Strategy) else NAMED[strategy]()
