"""How training goes, for the person who waits for it: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from instep.train.events import Callback

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from instep.train.state import Progress, Report
    from instep.train.trainer import Trainer

_REFRESH_S = 0.25  # a bar that is drawn more often only costs time


class ProgressBar(Callback):
    """Loss, samples per second, place and time left, on standard output, by the main rank.

    On a terminal one bar that stays below everything else that is printed; in a pipe or a file one line for each
    report and each evaluation. It works at reports only: a step costs nothing. No thread draws it. When standard
    output is closed it falls silent, and training goes on.
    """

    ranks = "main"

    def __init__(self) -> None:
        self._screen: _Screen = _Silence()
        self._first: Report | None = None
        self._last: Report | None = None
        self._started = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin the bar."""
        self._first = self._last = None
        self._started = time.monotonic()
        self._screen = _open_screen()
        self._screen.start(_place(trainer, last_epoch(trainer.progress), trainer.progress.step), _share(trainer))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Move the bar, or print a line."""
        self._first = self._first or report
        self._last = report
        place = _place(trainer, report.epoch, report.step)
        self._screen.report(place, _figures(report), _share(trainer), self._left(trainer, report))

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """Print the metrics as a line."""
        place = _place(trainer, last_epoch(trainer.progress), trainer.progress.step)
        self._screen.line(f"{place}   evaluation   {_named(results)}")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """Leave the terminal as it was."""
        self._screen.stop()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Say what was done in all."""
        self._screen.stop()
        spent = clock(time.monotonic() - self._started)
        self._screen.line(f"{trainer.progress.step} steps, {trainer.progress.samples} samples, {spent}")
        self._screen = _Silence()

    def _left(self, trainer: Trainer, report: Report) -> str:
        """The time left at the mean speed since the first report, all that is not training included."""
        if trainer.steps is None:
            return ""
        # The first report is slower than the others: libraries warm up, workers start.
        seconds, since = report.seconds, report.step
        if self._first is not None and self._first.step < report.step:
            seconds, since = report.seconds - self._first.seconds, report.step - self._first.step
        elif not since:
            return ""
        return f"{clock(seconds / since * max(0, trainer.steps - report.step))} left"


def last_epoch(progress: Progress) -> int:
    """The epoch of the last step: between two epochs the trainer stands at the beginning of the next."""
    return progress.epoch if progress.position else max(0, progress.epoch - 1)


def clock(seconds: float) -> str:
    """Seconds as ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """A figure for people: ``0.0123``, ``12.35``, ``1.2e-05``, ``3``."""
    if isinstance(value, int) or value == 0:
        return str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:.4g}"


def _named(values: dict[str, float]) -> str:
    return "   ".join(f"{name} {number(value)}" for name, value in values.items())


def _place(trainer: Trainer, epoch: int, step: int) -> str:
    """``epoch  1/10   step   50/300``, as far as the ends are known; the words of recipes/digits.py."""
    parts = []
    for word, done, end, width in (("epoch", epoch + 1, trainer.epochs, 2), ("step", step, trainer.steps, 4)):
        parts.append(f"{word} {done:{max(width, len(str(end or '')))}}" + (f"/{end}" if end else ""))
    return "   ".join(parts)


def _figures(report: Report) -> str:
    parts = [f"loss {report.loss:.4f}   {report.samples_per_s:6.0f} samples/s"]
    if report.values:
        parts.append(_named(report.values))
    if report.data_wait >= 0.1:
        parts.append(f"waiting for data {report.data_wait:.0%}")
    if report.skipped:
        parts.append(f"skipped {report.skipped}")
    return "   ".join(parts)


def _share(trainer: Trainer) -> float | None:
    """How much is done, 0 to 1; None where the end is not known."""
    return trainer.progress.step / trainer.steps if trainer.steps else None


def _parts(share: float | None) -> int:
    return round(1000 * (share or 0))


class _Screen:
    """Where it is shown."""

    def start(self, place: str, share: float | None) -> None:
        """Training begins."""

    def report(self, place: str, figures: str, share: float | None, left: str) -> None:
        """Show a report."""

    def line(self, text: str) -> None:
        """Print a line."""

    def stop(self) -> None:
        """Training has ended."""


class _Silence(_Screen):
    """Nowhere: before and after fit()."""


class _Lines(_Screen):
    """A pipe or a file."""

    def __init__(self) -> None:
        self._closed = False

    def report(self, place: str, figures: str, share: float | None, left: str) -> None:  # noqa: ARG002
        self.line("   ".join(part for part in (place, figures, left) if part))

    def line(self, text: str) -> None:
        if self._closed:
            return
        try:
            print(text, flush=True)  # to what is sys.stdout now
        except (OSError, ValueError, AttributeError) as error:
            self._closed = True
            _fall_silent(error)


class _Terminal(_Screen):
    """A bar by rich."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress as Bar, TextColumn

        columns = ("{task.fields[place]}", "{task.fields[figures]}", "{task.fields[left]}")
        place, figures, left = (TextColumn(column, markup=False) for column in columns)
        # No thread that redraws: it would take the interpreter from training ten times a second.
        self._bar: Bar = Bar(place, BarColumn(20), figures, left, console=console, auto_refresh=False)
        self._task: Any = None
        self._drawn = 0.0
        self._closed = False

    def start(self, place: str, share: float | None) -> None:
        self._task = self._bar.add_task(
            "", total=None if share is None else 1000, completed=_parts(share), place=place, figures="", left=""
        )
        self._do(self._bar.start)

    def report(self, place: str, figures: str, share: float | None, left: str) -> None:
        self._bar.update(self._task, completed=_parts(share), place=place, figures=figures, left=left)
        if time.monotonic() - self._drawn >= _REFRESH_S:
            self._drawn = time.monotonic()
            self._do(self._bar.refresh)

    def line(self, text: str) -> None:
        self._do(lambda: self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True))

    def stop(self) -> None:
        self._do(self._bar.stop)

    def _do(self, action: Any) -> None:
        if self._closed:
            return
        try:
            action()
        except (OSError, ValueError) as error:
            self._closed = True
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            _fall_silent(error)


def _open_screen() -> _Screen:
    try:
        terminal = sys.stdout.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or None
        return _Lines()
    if not terminal:
        return _Lines()
    from rich.console import Console

    console = Console()
    return _Terminal(console) if console.is_terminal and not console.is_dumb_terminal else _Lines()


def _fall_silent(error: BaseException) -> None:
    """After a reader has gone: what Python has not written yet would be an error of its own at the end."""
    if isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
