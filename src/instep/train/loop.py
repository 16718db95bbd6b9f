"""When: epochs, steps, and what comes between two steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.comm import get_logger
from instep.train import checks
from instep.train.preemption import Preempted
from instep.train.state import Report
from instep.train.ticks import Figures, Heard, Ticks, Word

if TYPE_CHECKING:
    from pathlib import Path

    from instep.train.preemption import Preemption
    from instep.train.trainer import Trainer

_log = get_logger("instep.train")


class Loop:
    """Drives one ``fit()``.

    Args:
        trainer: built, and standing where training begins or goes on.
        preemption: what the outside world wants.

    """

    def __init__(self, trainer: Trainer, preemption: Preemption) -> None:
        self.trainer = trainer
        self.preemption = preemption
        self.began = time.perf_counter()
        wishes = trainer.checkpoint
        self._save_every, self._save_epochs = (wishes.every_steps, wishes.every_epochs) if wishes else (None, None)
        self._ticks = Ticks(trainer.log_every, trainer.progress.step)
        self._due = 0
        # What has been read from a checkpoint need not be written again.
        self._saved_at = trainer.progress.step or -1
        self._clock = self.began
        self._tick_step = self._report_step = trainer.progress.step
        self._report_samples = trainer.progress.samples
        self._spent = 0.0
        self._set_due()

    def run(self) -> str:
        """Train until it is done.

        Returns:
            Why it ended: ``"epochs"``, ``"steps"``, or the reason of a stop.

        Raises:
            Preempted: asked to end, and saved.

        """
        reason = self._finished()
        while reason is None:
            reason = self._epoch() or self._finished()
        self._close()
        return reason

    def _finished(self) -> str | None:
        trainer = self.trainer
        if trainer.epochs is not None and trainer.progress.epoch >= trainer.epochs:
            return "epochs"
        if trainer.steps is not None and trainer.progress.step >= trainer.steps:
            return "steps"
        return None

    def _epoch(self) -> str | None:
        """One epoch, or the rest of it; a reason where training stops in it."""
        trainer, progress = self.trainer, self.trainer.progress
        step, step_end = trainer.step, trainer.events.step_end
        schedule = None if isinstance(trainer.schedule, ReduceLROnPlateau) else trainer.schedule
        steps = trainer.steps
        trainer.events.send("epoch_start", trainer)
        trainer.wrapped.train()
        first = progress.step
        fresh = progress.position == 0
        self._clock = time.perf_counter()
        for window in trainer.windows.read(progress.epoch, progress.position):
            step.run(window, progress.step)
            if schedule is not None:
                schedule.step()
            progress.step += 1
            progress.position += window.units
            progress.samples += window.samples
            for every, call in step_end:
                if progress.step % every == 0:
                    call(trainer)
            if progress.step >= self._due and (reason := self._between()):
                return reason
            if progress.step == steps:
                return self._end_of_steps()
        if fresh and progress.step == first:
            raise checks.no_step(trainer.global_batch)
        return self._end_of_epoch()

    def _end_of_steps(self) -> str | None:
        """After the last step of all. An epoch that ends here as well is closed like any other."""
        progress = self.trainer.progress
        total = self.trainer.windows.loader.units
        return self._end_of_epoch() if total is not None and progress.position >= total else None

    def _between(self) -> str | None:
        """What is due after this step. All ranks come here at the same steps."""
        trainer, step = self.trainer, self.trainer.progress.step
        heard = self._tick(report=self._ticks.is_report(step))
        if heard.preempt is None and _is_due(trainer.evaluate_every, step) and self._evaluate():
            heard = self._tick(report=False)  # what came out may have made a callback stop, on any rank
        if heard.preempt is None and _is_due(self._save_every, step):
            self._save()
        self._set_due()
        return self._heed(heard)

    def _end_of_epoch(self) -> str | None:
        trainer, progress = self.trainer, self.trainer.progress
        heard = self._tick(report=progress.step > self._report_step)
        if heard.preempt is not None:  # before an evaluation that may take long: it is made after the resume
            return self._heed(heard)
        progress.epoch += 1
        progress.position = 0
        trainer.events.send("epoch_end", trainer)
        if trainer.evaluate_every is None:
            self._evaluate()
        if self._save_epochs and progress.epoch % self._save_epochs == 0:
            self._save()
        heard = self._tick(report=False)  # callbacks of these events may have asked for a stop, on any rank
        self._set_due()
        return self._heed(heard)

    def _heed(self, heard: Heard) -> str | None:
        """Save and leave if some rank was asked to end; the reason if some rank wants to stop."""
        trainer = self.trainer
        if heard.preempt is not None:
            path = self._save()
            if trainer.saver is not None:
                trainer.saver.finish(export_too=False)
                path = None if trainer.saver.folder.failure else path
            _log.warning(
                "asked to end by %s: %s at step %d", heard.preempt,
                f"saved {path}" if path else "NOT saved",
                trainer.progress.step,
            )  # fmt: skip
            raise Preempted(heard.preempt, path)
        return heard.stop

    def _tick(self, *, report: bool) -> Heard:
        trainer, step = self.trainer, self.trainer.progress.step
        trainer.step.look_back()
        now = time.perf_counter()
        passed, self._clock = now - self._clock, now
        self._spent += passed
        self.preemption.look_at_the_clock()
        pace = passed / (step - self._tick_step) if step > self._tick_step else 0.0
        figures = self._figures() if report else None
        heard = self._ticks.exchange(Word(trainer.wants_to_stop, self.preemption.asked, pace, figures), step)
        self._tick_step = step
        if report:
            self._report(heard)
        if trainer.saver is not None:
            trainer.saver.poll()
        self._clock = time.perf_counter()
        return heard

    def _figures(self) -> Figures:
        trainer = self.trainer
        steps = max(1, trainer.progress.step - self._report_step)
        waited, trainer.windows.waited = trainer.windows.waited, 0.0
        forward, trainer.step.forward_s = trainer.step.forward_s, 0.0
        share = min(1.0, waited / self._spent) if self._spent else 0.0
        now = time.perf_counter() - self.began
        return Figures(
            now, self._spent, (waited + forward) / steps, share, trainer.step.take_sums(), trainer.take_notes()
        )

    def _report(self, heard: Heard) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        figures, values = heard.figures, heard.means()
        seconds = max(one.seconds for one in figures)
        samples = progress.samples - self._report_samples
        trainer.report = Report(
            step=progress.step,
            epoch=progress.epoch,
            samples=progress.samples,
            seconds=figures[0].since_s,
            loss=values.pop("loss", float("nan")),
            lr=float(trainer.optimizer.param_groups[0]["lr"]),
            samples_per_s=samples / seconds if seconds else 0.0,
            data_wait=sum(one.waited for one in figures) / len(figures),
            step_s=tuple(one.own_s for one in figures),
            values=values | heard.notes(),
            skipped=trainer.step.skipped,
        )
        self._report_step, self._report_samples, self._spent = progress.step, progress.samples, 0.0
        trainer.events.send("report", trainer, trainer.report)

    def _evaluate(self) -> bool:
        """Evaluate; whether there is anything to evaluate."""
        trainer = self.trainer
        if trainer.eval_loader is None:
            return False
        self._spent += time.perf_counter() - self._clock
        results = trainer.evaluate()
        trainer.evaluated_at = trainer.progress.step
        better = trainer.judge(results)
        trainer.wrapped.train()
        self._clock = time.perf_counter()
        if better and trainer.saver is not None and trainer.saver.wishes.best:
            self._save(best=True)
        return True

    def _save(self, *, best: bool = False) -> Path | None:
        trainer = self.trainer
        if trainer.saver is None:
            return None
        self._spent += time.perf_counter() - self._clock
        if best or self._saved_at != trainer.progress.step:
            trainer.saver.save(best=best)
            self._saved_at = trainer.progress.step
        self._clock = time.perf_counter()
        return trainer.saver.path_of(trainer.progress.step)

    def _close(self) -> None:
        """After the last step: what the last interval has not brought."""
        trainer, step = self.trainer, self.trainer.progress.step
        if step > self._report_step:
            self._tick(report=True)
        if trainer.evaluated_at != step:
            self._evaluate()
        self._save()

    def _set_due(self) -> None:
        step = self.trainer.progress.step
        due = [self._ticks.due]
        due += [step - step % every + every for every in (self.trainer.evaluate_every, self._save_every) if every]
        self._due = min(due)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
