"""The order of an epoch: a function of seed and epoch, whatever the sampler draws it from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Sampler

from instep.data.randomness import Randomness, derive, within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from instep.data.partition import Partition

_DRAWN_AT_ONCE = 1024
_DRAWN_AT_MOST = 16 * _DRAWN_AT_ONCE


class Draw(NamedTuple):
    """What is to be fetched for one batch, and what its random numbers depend on."""

    epoch: int
    position: int  # units of the epoch before its global batch
    index: Any


def parts(sampler: object) -> list[object]:
    """The sampler and the samplers inside it: a batch sampler's ``sampler``, a wrapper's ``base``."""
    found: list[object] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if any(part is known for known in found):
            continue
        found.append(part)
        inner = getattr(part, "__dict__", {})
        waiting += [v for name, v in inner.items() if isinstance(v, Sampler) or name in {"sampler", "batch_sampler"}]
    return found


def draw(sampler: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """The sampler's order for one epoch, drawn lazily; nothing outside is read, and nothing is disturbed.

    Samplers that draw from the global generators of torch, numpy or random, or from generators that they keep as
    attributes, find seeded ones while they draw. One that wants to know the epoch is told.
    """
    inside = parts(sampler)
    tell(epoch, *inside)
    randomness = Randomness(derive("order", seed, epoch), owners=inside)
    return within(lambda: randomness, sampler, _DRAWN_AT_ONCE, _DRAWN_AT_MOST)


def tell(epoch: int, *listeners: object) -> None:
    """Call ``set_epoch(epoch)`` on those that have it."""
    for listener in listeners:
        if callable(set_epoch := getattr(listener, "set_epoch", None)):
            set_epoch(epoch)


class RankSampler(Sampler[Draw]):
    """What one rank fetches, epoch by epoch: the sampler that our DataLoader gets.

    Args:
        source: the sampler of the whole, as one process would use it.
        partition: how each global batch is dealt out.
        rank: whose share this is.
        seed: with the epoch the only thing that the order depends on.
        whole: the units of `source` are fetched as they are, not gathered into a batch.

    """

    def __init__(self, source: Iterable[Any], partition: Partition, *, rank: int, seed: int, whole: bool) -> None:
        self.source = source
        self.partition = partition
        self.rank = rank
        self.seed = seed
        self.whole = whole
        self._epoch = self._start = 0

    def begin(self, epoch: int, start: int) -> None:
        """The next iteration reads `epoch`, from position `start` on."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[Draw]:
        # The epoch is read now, not when the first batch is: another iteration may have begun by then.
        return self._draws(self._epoch, self._start, draw(self.source, self.seed, self._epoch))

    def _draws(self, epoch: int, start: int, order: Iterator[Any]) -> Iterator[Draw]:
        for position, mine in self.partition.share(order, self.rank, start):
            yield Draw(epoch, position, mine[0] if self.whole else mine)
