"""Who takes which sample: plain arithmetic over counts and iterators, without torch and without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


@dataclass(frozen=True)
class Partition:
    """One order of units, cut into global batches, and each of those dealt out to the ranks like cards.

    Global batch k is ``order[k * block : (k + 1) * block]``; rank r takes every ``world_size``-th unit of it, from
    its r-th on. So the union over the ranks depends on `block` alone, not on how many ranks there are. A unit is a
    sample, or a whole batch where the user's own batch sampler makes the batches.

    Attributes:
        world_size: number of ranks.
        per_rank: units that a rank takes of a full global batch.
        drop_last: whether a last global batch that is not full is left out, by all ranks.

    """

    world_size: int
    per_rank: int
    drop_last: bool = False

    @property
    def block(self) -> int:
        """Units in a full global batch."""
        return self.world_size * self.per_rank

    def steps(self, units: int) -> int:
        """Number of global batches that an order of that many units makes."""
        return units // self.block if self.drop_last else -(-units // self.block)

    def size(self, units: int, step: int) -> int:
        """Units in the global batch at `step`, over all ranks."""
        return min(self.block, units - step * self.block)

    def kept(self, units: int) -> int:
        """Units that are seen at all: all of them unless `drop_last`."""
        return units // self.block * self.block if self.drop_last else units

    def count(self, units: int, rank: int) -> int:
        """Units that `rank` takes in one epoch."""
        return len(range(rank, self.kept(units), self.world_size))

    def batches(self, units: int, rank: int) -> int:
        """Batches that `rank` makes of them."""
        return -(-self.count(units, rank) // self.per_rank)

    def idle_ranks(self, units: int) -> int:
        """Ranks that take nothing of the last global batch, and so make one step fewer than the others."""
        rest = self.kept(units) % self.block
        return max(0, self.world_size - rest) if rest else 0

    def share(self, order: Iterator[T], rank: int) -> Iterator[tuple[int, list[T]]]:
        """What `rank` takes of each global batch, read lazily: `order` may be endless.

        Yields:
            The step and the rank's units, at most `per_rank` and never none of them.

        """
        step = 0
        while True:
            # Each unit is let go at once unless it is ours: streams hold images, not numbers.
            mine, size = [], 0
            for size, unit in enumerate(islice(order, self.block), start=1):
                if (size - 1) % self.world_size == rank:
                    mine.append(unit)
            if self.drop_last and size < self.block:
                return
            if mine:
                yield step, mine
            if size < self.block:
                return
            step += 1
