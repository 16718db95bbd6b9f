"""Where the time goes, on chosen steps and ranks: traces by torch.profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from instep.comm import get_logger
from instep.errors import TrainError
from instep.train.events import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.train.trainer import Trainer


class Profiler(Callback):
    """Write what each operator took in some steps as ``profile/rank-N.json``, for chrome://tracing or Perfetto.

    Each chosen rank writes its own file. A step's number is that of its update: ``range(10, 13)`` are the steps after
    which ``progress.step`` is 10, 11 and 12. What the callbacks after this one do at a step's end counts for the next.

    Args:
        steps: which steps, one after the other.
        ranks: which ranks, or ``"all"``. (The callback itself runs on all of them, so that each can be chosen.)
        folder: where; None: ``profile`` in the run folder.
        options: for ``torch.profiler.profile``: ``record_shapes``, ``profile_memory``, ``with_stack``, ...

    """

    ranks = "all"

    def __init__(
        self,
        steps: range = range(10, 13),
        *,
        ranks: Sequence[int] | Literal["all"] = (0,),
        folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(steps, range) or steps.step != 1 or not len(steps) or steps.start < 1:
            raise TrainError(
                f"Profiler cannot watch steps={steps!r}.", cure="Steps one after the other, from 1 on: range(10, 13)"
            )
        self._steps = steps
        self._chosen = ranks
        self._folder = None if folder is None else Path(folder)
        self._options = options
        self._begin = -1  # the progress.step at which it starts; -1: never on this rank
        self._warm_up = 0
        self._profile: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Plan the steps that are still to come.

        Raises:
            TrainError: a rank does not exist, or there is no folder.

        """
        session = trainer.session
        chosen = range(session.world_size) if self._chosen == "all" else self._chosen
        if unknown := [rank for rank in chosen if rank not in range(session.world_size)]:
            raise TrainError(
                f"Profiler cannot watch rank {unknown[0]}.", evidence=[f"there are ranks 0 to {session.world_size - 1}"]
            )
        folder = self._folder or (trainer.folder / "profile" if trainer.folder else None)
        if folder is None:
            raise TrainError(
                "There is no folder for the profile: this program was not started by `instep run`.",
                cure="Say where: Profiler(folder='profile')",
            )
        done = trainer.progress.step
        first = max(self._steps.start, done + 1)
        self._begin = -1
        if session.rank not in chosen or first >= self._steps.stop:
            return
        self._path = folder / f"rank-{session.rank}.json"
        self._begin = max(first - 2, done)  # one step before, if there is one: the profiler's own start is slow
        self._warm_up = first - 1 - self._begin
        self._start_at(done)

    def on_step_end(self, trainer: Trainer) -> None:
        """Start, go on, or write the trace."""
        if self._begin < 0:
            return
        if self._profile is None:
            self._start_at(trainer.progress.step)
            return
        self._profile.step()
        if trainer.progress.step >= self._steps.stop - 1:
            self._stop()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """Write what there is."""
        self._stop()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write what there is."""
        if self._begin > trainer.progress.step:
            get_logger().warning(
                "Profiler has nothing to write: training ended after step %d, before step %d.",
                trainer.progress.step,
                self._steps.start,
            )
        self._stop()

    def _start_at(self, step: int) -> None:
        if step != self._begin:
            return
        from torch import profiler

        active = self._steps.stop - 1 - step - self._warm_up
        schedule = profiler.schedule(wait=0, warmup=self._warm_up, active=active, repeat=1)
        self._profile = profiler.profile(schedule=schedule, on_trace_ready=self._write, **self._options)
        self._profile.start()

    def _write(self, profile: Any) -> None:
        assert self._path is not None  # on_fit_start has set it
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            get_logger().warning("The profile of this rank cannot be written, and training goes on: %s", error)

    def _stop(self) -> None:
        profile, self._profile, self._begin = self._profile, None, -1
        if profile is not None:
            profile.stop()
