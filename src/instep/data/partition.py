"""Who takes which sample: plain arithmetic over counts and iterators, without torch and without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


@dataclass(frozen=True)
class Partition:
    """One order of units, cut into global batches, and each of those dealt out to the ranks like cards.

    From position p on, global batch k is ``order[p + k * block : p + (k + 1) * block]``; rank r takes every
    ``world_size``-th unit of it, from its r-th on. So the union over the ranks depends on `p` and `block` alone, not
    on how many ranks there are, and `block` need not be a multiple of their number: 16 over 3 ranks are 6, 5 and 5.
    A unit is a sample, or a whole batch where the user's own batch sampler makes the batches.

    Attributes:
        world_size: number of ranks.
        block: units in a full global batch.
        drop_last: whether a last global batch that is not full is left out, by all ranks.

    """

    world_size: int
    block: int
    drop_last: bool = False

    def part(self, rank: int, size: int | None = None) -> int:
        """Units that `rank` takes of a global batch of `size`; None: of a full one."""
        return len(range(rank, self.block if size is None else size, self.world_size))

    def steps(self, units: int) -> int:
        """Number of global batches that an order of that many units makes."""
        return units // self.block if self.drop_last else -(-units // self.block)

    def size(self, units: int, position: int) -> int:
        """Units in the global batch that begins at `position`, over all ranks; 0 where none begins any more."""
        left = max(0, units - position)
        return 0 if self.drop_last and left < self.block else min(self.block, left)

    def kept(self, units: int) -> int:
        """Units that are seen at all: all of them unless `drop_last`."""
        return units // self.block * self.block if self.drop_last else units

    def count(self, units: int, rank: int) -> int:
        """Units that `rank` takes in one epoch."""
        full, rest = divmod(self.kept(units), self.block)
        return full * self.part(rank) + self.part(rank, rest)

    def batches(self, units: int, rank: int) -> int:
        """Batches that `rank` makes of them."""
        full, rest = divmod(self.kept(units), self.block)
        return full * (rank < self.block) + (rank < rest)

    def idle_ranks(self, units: int) -> int:
        """Ranks that take nothing of the last global batch, and so make one step fewer than the others."""
        rest = self.kept(units) % self.block
        return max(0, self.world_size - rest) if rest else 0

    def share(self, order: Iterable[T], rank: int, start: int = 0) -> Iterator[tuple[int, list[T]]]:
        """What `rank` takes of each global batch from position `start` on, read lazily: `order` may be endless.

        Yields:
            The position where the global batch begins, and the rank's units, never none of them.

        """
        position, order = start, islice(order, start, None)
        while True:
            # Each unit is let go at once unless it is ours: streams hold images, not numbers.
            seen = count()
            dealt = zip(islice(order, self.block), seen, strict=False)
            mine = [unit for unit, _ in islice(dealt, rank, None, self.world_size)]
            size = next(seen)  # as many as were read: zip takes a number only for a unit that was there
            if self.drop_last and size < self.block:
                return
            if mine:
                yield position, mine
            if size < self.block:
                return
            position += size
