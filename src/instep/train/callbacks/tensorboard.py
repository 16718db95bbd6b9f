"""TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import TrainError
from instep.train.events import Callback

if TYPE_CHECKING:
    from instep.train.state import Report
    from instep.train.trainer import Trainer


class TensorBoard(Callback):
    """Write reports (``train/...``) and evaluations (``eval/...``) for TensorBoard, by the main rank.

    A run that goes on from step k hides what the run before wrote beyond it.

    Args:
        folder: where; None: ``tensorboard`` in the run folder.
        histograms_every: also the distribution of each parameter's gradient, at each so-many-th step. It copies all
            gradients to the CPU, so not at every step.

    """

    ranks = "main"

    def __init__(self, folder: str | Path | None = None, *, histograms_every: int | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None
        if histograms_every is not None:
            self.every = histograms_every
            setattr(self, "on_gradients", self._histograms)  # noqa: B010  # heard only where it is wanted

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open an event file.

        Raises:
            TrainError: TensorBoard is not installed, or there is no folder.

        """
        folder = self._folder or (trainer.folder / "tensorboard" if trainer.folder else None)
        if folder is None:
            raise TrainError(
                "There is no folder for TensorBoard: this program was not started by `instep run`.",
                cure="Say where: TensorBoard('tensorboard')",
            )
        if "on_gradients" in vars(self) and trainer.strategy.shards_gradients:
            raise TrainError(
                f"TensorBoard cannot show the distribution of gradients under {trainer.strategy.name}: "
                "the main rank has only a part of each.",
                cure="TensorBoard() without histograms_every, and GradientStats() for their norms",
            )
        self._writer = _writer()(folder, purge_step=trainer.progress.step + 1)

    def on_report(self, trainer: Trainer, report: Report) -> None:  # noqa: ARG002
        """Write the report."""
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "samples_per_s": report.samples_per_s,
            "data_wait": report.data_wait,
            "slowest_step_s": max(report.step_s, default=0.0),
            "epoch": report.epoch,
        }
        self._add("train", {**values, **report.values}, report.step)

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """Write the metrics."""
        self._add("eval", results, trainer.progress.step)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """Close the file."""
        self._close()

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Close the file."""
        self._close()

    def _histograms(self, trainer: Trainer) -> None:
        for name, parameter in trainer.model.named_parameters():
            gradient = parameter.grad
            # Infinities have no histogram; fp16 has them now and then, in steps that are skipped.
            if self._writer is not None and gradient is not None and bool(gradient.isfinite().all()):
                self._writer.add_histogram(f"gradients/{name}", gradient.float(), trainer.progress.step + 1)

    def _add(self, group: str, values: dict[str, float], step: int) -> None:
        if self._writer is None:  # an evaluation outside of fit()
            return
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainError(
            "TensorBoard is not installed.", evidence=[str(error)], cure="pip install 'instep[tensorboard]'"
        ) from None
    return SummaryWriter
