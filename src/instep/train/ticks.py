"""Where the ranks talk about what is not a gradient: at some step boundaries, the same ones on every rank.

To ask at every step whether anybody wants to stop would cost a tenth of a small step. So the ranks meet at steps
that they have agreed on before: at each report, and often enough in between that a signal is heeded within about
half a second (or one step, where a step takes longer).
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.comm import gather_objects
from instep.comm.session import together

if TYPE_CHECKING:
    from collections.abc import Sequence

HEEDED_WITHIN_S = 0.5
_MOST_STEPS = 10_000
_ROOM = 1024  # bytes of a word that travel at once


@dataclass(frozen=True)
class Word:
    """What one rank brings to a tick.

    Attributes:
        stop: why this rank wants training to stop, or None.
        preempt: why it wants it to save and end, or None.
        pace_s: seconds per step since the last tick, 0 where there was none.
        figures: None where no report is due.

    """

    stop: str | None = None
    preempt: str | None = None
    pace_s: float = 0.0
    figures: Figures | None = None


@dataclass(frozen=True)
class Figures:
    """What one rank has measured since the last report.

    Attributes:
        since_s: seconds since fit() began.
        seconds: spent on training.
        own_s: seconds per step of its own: waiting for batches and forward passes, without waiting for other ranks.
        waited: share of the time that it waited for batches.
        sums: by name: (sum of value x weight, sum of weights).
        notes: values of ``Trainer.log``.

    """

    since_s: float
    seconds: float
    own_s: float
    waited: float
    sums: dict[str, tuple[float, float]]
    notes: dict[str, float]


@dataclass(frozen=True)
class Heard:
    """What all ranks know after a tick.

    Attributes:
        words: of each rank.
        stop: the first rank's reason to stop, with its number; None where nobody wants to.
        preempt: the same for saving and ending.

    """

    words: tuple[Word, ...]
    stop: str | None
    preempt: str | None

    @property
    def figures(self) -> list[Figures]:
        """Of each rank; empty where no report is due."""
        return [word.figures for word in self.words if word.figures is not None]

    def means(self) -> dict[str, float]:
        """By name: the weighted mean over the ranks; a name may be missing on some of them."""
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.figures:
            for name, pair in one.sums.items():
                found.setdefault(name, []).append(pair)
        means = {}
        for name, pairs in found.items():
            weight = math.fsum(one for _, one in pairs)
            means[name] = math.fsum(one for one, _ in pairs) / weight
        return means

    def notes(self) -> dict[str, float]:
        """What was logged: the lowest rank's value where several have one."""
        merged: dict[str, float] = {}
        for one in reversed(self.figures):
            merged.update(one.notes)
        return merged


class Ticks:
    """When the next tick is due.

    Args:
        log_every: steps between reports.
        step: where training stands.

    """

    def __init__(self, log_every: int, step: int = 0) -> None:
        self.log_every = log_every
        self._between = 1
        self._next = step + 1
        self._next_report = step - step % log_every + log_every
        self.due = min(self._next, self._next_report)

    def is_report(self, step: int) -> bool:
        """Whether a report belongs to this step."""
        return step >= self._next_report

    def exchange(self, word: Word, step: int) -> Heard:
        """All ranks come with their words at the same step. Sets when the next tick is due."""
        words = tuple(_gather(word))
        slowest = max(one.pace_s for one in words)
        if slowest > 0:
            # At most four times as far as before: the first steps of a run tell little.
            wanted = min(int(HEEDED_WITHIN_S / slowest), self._between * 4, _MOST_STEPS)
            self._between = max(1, wanted)
        self._next = step + self._between
        if step >= self._next_report:
            self._next_report = step - step % self.log_every + self.log_every
        self.due = min(self._next, self._next_report)
        return Heard(words, _first(words, "stop"), _first(words, "preempt"))


def _gather(word: Word) -> list[Word]:
    """The words of all ranks: in one collective where they are short, as nearly always; gather_objects takes two."""
    session = together("Trainer.fit")
    if session.world_size == 1:
        return [word]
    import torch
    import torch.distributed as dist

    told = pickle.dumps(word)
    sent = bytearray((len(told).to_bytes(8, "little") + told[:_ROOM]).ljust(8 + _ROOM))
    table = torch.empty(session.world_size, len(sent), dtype=torch.uint8)
    dist.all_gather(list(table), torch.frombuffer(sent, dtype=torch.uint8), group=session.group)
    rows = [row.tobytes() for row in table.numpy()]
    if max(int.from_bytes(row[:8], "little") for row in rows) > _ROOM:
        return gather_objects(word)
    return [pickle.loads(row[8:]) for row in rows]  # noqa: S301  # from a rank of this program


def _first(words: Sequence[Any], wish: str) -> str | None:
    for rank, word in enumerate(words):
        reason = getattr(word, wish)
        if reason is not None:
            return str(reason) if all(getattr(one, wish) == reason for one in words) else f"{reason} (rank {rank})"
    return None
