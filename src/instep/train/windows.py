"""The micro-batches of each step, on every rank equally many, with the weight that makes their sum exact.

The loss of a step is the mean over its global batch: all samples (or tokens) of all micro-batches of all ranks.
Each micro-batch brings the mean over its own n of them, so it counts n / N, where N is known before the first
backward pass: by arithmetic where the data have a length, else by one small exchange that runs while the step
before is computed. A rank that has no sample left where others have some takes its last batch once more with weight
0: it is in every collective, also those inside the forward pass, and adds nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from instep.comm import broadcast_object, get_logger
from instep.errors import TrainError
from instep.train import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instep.comm import Session
    from instep.data import ShardedLoader

Uneven = Literal["join", "stop"]

_log = get_logger("instep.train")


class Micro:
    """What one forward pass takes on this rank.

    Attributes:
        batch: on this rank's device.
        weight: how much it counts: its samples, or what the user's weight function says; 0 for a repeated batch.
        share: what its mean loss is multiplied with before the backward pass.

    """

    __slots__ = ("batch", "share", "weight")

    def __init__(self, batch: Any, weight: float, share: float) -> None:
        self.batch = batch
        self.weight = weight
        self.share = share


class Window:
    """The micro-batches of one step.

    Attributes:
        micros: this rank's; every rank has equally many.
        samples: of all ranks.
        weight: the sum of the weights of all ranks.
        units: how far the position in the epoch moves.

    """

    __slots__ = ("micros", "samples", "units", "weight")

    def __init__(self, micros: list[Micro], samples: int, weight: float, units: int) -> None:
        self.micros = micros
        self.samples = samples
        self.weight = weight
        self.units = units


@dataclass
class Mine:
    """What this rank has read for a step, before it is known what the others have."""

    batches: list[Any]
    samples: list[int]
    weights: list[float]


class Windows:
    """Reads a loader epoch by epoch, a window per step.

    Args:
        loader: this rank's part of the training data.
        session: the world.
        accumulate: micro-batches per step.
        weight: how much a batch counts, such as its number of tokens that are not padding; None: its samples.
        uneven: what happens when ranks with data of their own have unequally much: ``join``: those without a batch
            repeat their last one with weight 0 until all have ended; ``stop``: all end with the first.
        divisor: by what the strategy divides the sum of the ranks' gradients.

    Attributes:
        waited: seconds that this rank has waited for batches.

    """

    def __init__(
        self,
        loader: ShardedLoader,
        session: Session,
        *,
        accumulate: int,
        weight: Callable[[Any], Any] | None,
        uneven: Uneven,
        divisor: int,
    ) -> None:
        self.loader = loader
        self.session = session
        self.accumulate = accumulate
        self.weight = weight
        self.uneven = uneven
        self.divisor = divisor
        self.waited = 0.0
        self._last: Any = None
        self._everyone_has_one = False
        self._ended: set[int] = set()

    def read(self, epoch: int, position: int) -> Iterator[Window]:
        """The windows of one epoch from `position` on. All ranks read together.

        Raises:
            TrainError: no rank has a sample.

        """
        self.loader.seek(epoch, position)
        found = iter(self.loader)
        self._ended = set()
        return self._counted(found, position) if self.is_counted else self._agreed(found)

    @property
    def is_counted(self) -> bool:
        """Whether arithmetic says who has how many samples of each step."""
        loader = self.loader
        return loader.shared and loader.units is not None and loader.batch_size is not None

    # Data of known length: who has what follows from arithmetic.

    def _counted(self, found: Iterator[Any], position: int) -> Iterator[Window]:
        pending: tuple[Mine, int, Exchange] | None = None
        while sizes := self._sizes(position):
            samples = sum(sizes)
            position += samples
            taken = [self._take(found, size) for size in sizes]
            if self.weight is None:
                scale = self.divisor / samples
                yield Window([Micro(batch, mine, mine * scale) for mine, batch in taken], samples, samples, samples)
                continue
            weights = [self._weigh(batch) if mine else 0.0 for mine, batch in taken]
            read = Mine([batch for _, batch in taken], [], weights)
            exchange = Exchange(self.session, [math.fsum(weights)])
            if pending is not None:
                yield self._weighted(*pending)
            pending = read, samples, exchange
        if pending is not None:
            yield self._weighted(*pending)

    def _sizes(self, position: int) -> list[int]:
        """Samples of the global batches that make the step at `position`."""
        sizes: list[int] = []
        while len(sizes) < self.accumulate and (size := self.loader.size_at(position)):
            sizes.append(size)
            position += size
        return sizes

    def _weighted(self, mine: Mine, samples: int, exchange: Exchange) -> Window:
        weight = math.fsum(row[0] for row in exchange.result())
        return Window(self._micros(mine.batches, mine.weights, weight), samples, weight, samples)

    # Data of unknown length: the ranks tell each other, one window ahead.

    def _agreed(self, found: Iterator[Any]) -> Iterator[Window]:
        pending = self._ask(found)
        while True:
            mine, exchange = pending
            table = exchange.result()
            window = self._common(mine, table)
            if window is None:
                return
            # Whoever has found no full window has come to the end, and all know it.
            ends = all(int(row[0]) < self.accumulate for row in table) or (
                self.uneven == "stop" and any(int(row[0]) < self.accumulate for row in table)
            )
            if ends:
                self._say_who_ended(table, last=True)
                yield window
                return
            pending = self._ask(found)
            yield window

    def _ask(self, found: Iterator[Any]) -> tuple[Mine, Exchange]:
        mine = Mine([], [], [])
        while len(mine.batches) < self.accumulate:
            try:
                batch = self._next(found)
            except StopIteration:
                break
            mine.batches.append(batch)
            mine.samples.append(batches.count(batch))
            mine.weights.append(float(mine.samples[-1]) if self.weight is None else self._weigh(batch))
        rest = [0.0] * (self.accumulate - len(mine.batches))
        row = [float(len(mine.batches)), *map(float, mine.samples), *rest, *mine.weights, *rest]
        return mine, Exchange(self.session, row)

    def _common(self, mine: Mine, table: list[list[float]]) -> Window | None:
        """The window that all ranks take, None where it is empty."""
        lengths = [int(row[0]) for row in table]
        most = max(lengths) if self.uneven == "join" else min(lengths)
        if most == 0:
            self._say_who_ended(table, last=True)
            return None
        self._say_who_ended(table, last=False)
        samples = int(sum(sum(row[1 : 1 + most]) for row in table))
        first = 1 + self.accumulate
        weight = math.fsum(value for row in table for value in row[first : first + most])
        taken, weights = mine.batches[:most], mine.weights[:most]
        if not self._everyone_has_one:
            if min(lengths) == 0:
                self._borrow(next(rank for rank, length in enumerate(lengths) if length))
            self._everyone_has_one = True
        while len(taken) < most:
            taken.append(self._last)
            weights.append(0.0)
        return Window(self._micros(taken, weights, weight), samples, weight, most * self.loader.block)

    def _say_who_ended(self, table: list[list[float]], *, last: bool) -> None:
        """Once per epoch and rank: who has come to the end of its data while others had not."""
        ended = {rank for rank, row in enumerate(table) if int(row[0]) < self.accumulate}
        new = ended - self._ended
        self._ended |= ended
        if self.session.world_size == 1 or not new or len(new) == self.session.world_size:
            return
        if last and self.uneven == "join":  # all have ended: those before were told of
            return
        have = ", ".join(f"rank {rank}: {int(row[0])}" for rank, row in enumerate(table))
        what = (
            "all ranks stop here: uneven='stop'"
            if self.uneven == "stop"
            else "those that have ended repeat their last batch with weight 0: uneven='join'"
        )
        if self.session.is_main:
            _log.info("unequal data: of the next %d batches the ranks have %s; %s", self.accumulate, have, what)

    # Both.

    def _next(self, found: Iterator[Any]) -> Any:
        start = time.perf_counter()
        batch = next(found)
        self._last = batch = batches.to_device(batch, self.session.device)
        self.waited += time.perf_counter() - start
        return batch

    def _take(self, found: Iterator[Any], size: int) -> tuple[int, Any]:
        """Its samples of a global batch of `size`, and its batch; where this rank has none, 0 and its last batch."""
        rank, world_size = self.session.rank, self.session.world_size
        mine = len(range(rank, size, world_size))
        batch = self._next(found) if mine else None
        if size >= world_size:
            self._everyone_has_one = True
        elif not self._everyone_has_one:  # fewer samples than ranks: all come here, and rank 0 has one
            self._borrow(0)
        return mine, batch if mine else self._last

    def _borrow(self, lender: int) -> None:
        """Let a rank that never had a batch have one of another rank's, to repeat."""
        lent = broadcast_object(self._last, lender)
        self._last = batches.to_device(lent, self.session.device) if self._last is None else self._last
        self._everyone_has_one = True

    def _weigh(self, batch: Any) -> float:
        assert self.weight is not None
        given = self.weight(batch)
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise TrainError(
                "weight() gave no number of at least 0 for a batch.",
                evidence=[f"{given!r:.100}"],
                cure="such as  weight=lambda batch: (batch['labels'] != -100).sum()",
            )
        return value

    def _micros(self, taken: list[Any], weights: list[float], total: float) -> list[Micro]:
        if total <= 0:
            raise TrainError(
                "A whole step weighs nothing: the weights of its batches are 0 on every rank.",
                evidence=[f"{len(taken)} micro-batches on this rank, weights {weights}"],
                cure="Leave such batches out of the data, or let weight() count what the loss is a mean over.",
            )
        return [
            Micro(batch, weight, weight * self.divisor / total) for batch, weight in zip(taken, weights, strict=True)
        ]


class Exchange:
    """A row of numbers of each rank, on its way to all the others while this one goes on."""

    def __init__(self, session: Session, row: list[float]) -> None:
        import torch.distributed as dist

        self._mine = torch.tensor(row, dtype=torch.float64)
        self._table = [self._mine]
        self._work: Any = None
        if session.world_size > 1:
            self._table = [torch.empty_like(self._mine) for _ in range(session.world_size)]
            self._work = dist.all_gather(self._table, self._mine, group=session.group, async_op=True)

    def result(self) -> list[list[float]]:
        """The rows, by rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [row.tolist() for row in self._table]
