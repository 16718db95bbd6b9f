"""Stop when it gets no better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from instep.comm import agree
from instep.errors import TrainError
from instep.train import checks
from instep.train.events import Callback

if TYPE_CHECKING:
    from instep.train.trainer import Trainer


class EarlyStop(Callback):
    """Stop training when a metric has not become better for some evaluations. All ranks stop after the same step.

    It looks at the main rank's value on every rank, so that a metric which differs by a rounding error, or by a bug,
    cannot part the ranks. NaN is no improvement.

    Args:
        monitor: the name of a metric; None: the trainer's ``monitor``.
        patience: how many evaluations in a row may bring no improvement before it stops.
        min_delta: by how much a value has to be better than the best so far to count.
        larger_is_better: of the value; None: as for the trainer's ``monitor``, unless its name says loss, error, or
            perplexity.

    Attributes:
        best: the best value so far, None before the first.
        best_step: the step of that value.

    """

    ranks = "all"

    def __init__(
        self,
        monitor: str | None = None,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        larger_is_better: bool | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise TrainError(
                f"EarlyStop cannot have patience={patience!r}.", cure="A number of evaluations: patience=3"
            )
        if not min_delta >= 0:
            raise TrainError(f"EarlyStop cannot have min_delta={min_delta!r}.", cure="Zero or more: min_delta=0.001")
        self.monitor = monitor
        self.larger_is_better = larger_is_better
        self._name = monitor or ""
        self._larger = True
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step = 0
        self._waited = 0
        self._training = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Evaluations count from now on.

        Raises:
            TrainError: there is nothing to watch.

        """
        self._name = self.monitor or trainer.monitor or ""
        if not self._name:
            raise TrainError(
                "EarlyStop does not know what to watch.", cure="EarlyStop('loss'), or Trainer(monitor='loss')"
            )
        known = checks.metric_names(trainer) if trainer.eval_data is not None else []
        if known is not None and self._name not in known:
            raise self._unknown(known)
        theirs = trainer.larger_is_better if self._name == trainer.monitor else None
        wishes = (self.larger_is_better, theirs, checks.larger_is_better(self._name))
        self._larger = next(one for one in wishes if one is not None)
        self._training = True

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Evaluations on their own, of other data perhaps, do not count."""
        self._training = False

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """As at the end."""
        self._training = False

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """Compare with the best so far.

        Raises:
            TrainError: no metric has that name.

        """
        if not self._training:
            return
        if self._name not in results:
            raise self._unknown(list(results))
        value = float(agree(results[self._name]))
        if self._better(value):
            self.best, self.best_step, self._waited = value, trainer.progress.step, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            trainer.stop(self._reason(value))

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step, and the evaluations since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        best = state["best"]
        self.best = None if best is None else float(best)
        self.best_step, self._waited = int(state["best_step"]), int(state["waited"])

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best if self._larger else self.best - value
        return gain > self.min_delta

    def _unknown(self, known: list[str]) -> TrainError:
        return TrainError(
            f"EarlyStop watches {self._name!r}, and no metric has that name.",
            evidence=[f"there is: {', '.join(known) or 'nothing'}"],
            cure=f"EarlyStop({known[0]!r})" if known else "Trainer(..., eval_data=..., metrics={...})",
        )

    def _reason(self, value: float) -> str:
        better = "larger" if self._larger else "smaller"
        times = f"{self._waited} evaluations" if self._waited > 1 else "1 evaluation"
        best = "never a number" if self.best is None else f"best {self.best:g} at step {self.best_step}"
        return f"{self._name} has not become {better} for {times}: now {value:g}, {best}"
