"""Where training stands, and what is reported of it: plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where training stands. The same on every rank.

    Attributes:
        step: optimizer updates done: at step k the weights are those after k updates.
        epoch: the epoch that is being read, from 0.
        position: samples of this epoch that were trained on, all ranks together.
        samples: samples trained on since step 0, all ranks together.

    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, int]:
        """The four numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the state says."""
        for name in asdict(self):
            setattr(self, name, int(state[name]))


@dataclass(frozen=True)
class Report:
    """What happened since the last report. The same on every rank.

    Attributes:
        step: optimizer updates done.
        epoch: the epoch that is being read, from 0.
        samples: samples trained on since step 0, all ranks together.
        seconds: since fit() began.
        loss: the mean over all samples (or weights) of all ranks since the last report.
        lr: learning rate of the first parameter group, for the step that comes.
        samples_per_s: all ranks together.
        data_wait: share of the time that ranks waited for their next batch, 0 to 1, mean over the ranks.
        step_s: mean seconds that each rank spent on a step, by rank, by its own clock.
        values: what the training step or ``Trainer.log`` added.
        skipped: steps skipped so far because of a loss or gradient that is not finite.

    """

    step: int
    epoch: int
    samples: int
    seconds: float
    loss: float
    lr: float
    samples_per_s: float
    data_wait: float
    step_s: tuple[float, ...]
    values: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    @property
    def slowest(self) -> int:
        """The rank with the longest mean step."""
        return max(range(len(self.step_s)), key=lambda rank: self.step_s[rank])
