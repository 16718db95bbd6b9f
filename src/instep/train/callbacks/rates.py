"""The learning rate of every parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.train.events import Callback

if TYPE_CHECKING:
    from instep.train.trainer import Trainer


class LearningRates(Callback):
    """Add the learning rate of each parameter group to the reports: ``lr/0``, or ``lr/NAME`` for a group with a name.

    It is the rate of the update itself: read before the update and the schedule's step.
    """

    ranks = "all"

    def on_gradients(self, trainer: Trainer) -> None:
        """Read the rates."""
        groups = enumerate(trainer.optimizer.param_groups)
        trainer.log({f"lr/{group.get('name', number)}": float(group["lr"]) for number, group in groups})
