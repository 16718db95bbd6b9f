"""Whether the machine is used: samples per second, waiting for data, and a rank that holds up the others."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from instep.comm import get_logger
from instep.errors import TrainError
from instep.train.events import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.train.state import Report
    from instep.train.trainer import Trainer


class Throughput(Callback):
    """Warn of a rank that is slower than the others, and of a lot of waiting for data; sum up at the end.

    Each rank times its own steps by its own clock, and only those lengths are compared: clocks of different machines
    never are. A warning comes once, until it has been well for a report. It works at reports only.

    Args:
        slower: warn when a rank's mean step takes this much longer than the median of the others: 0.2 is 20 %.
        waiting: warn when this share of the time is spent waiting for data.
        reports: for how many reports in a row.

    """

    ranks = "main"

    def __init__(self, *, slower: float = 0.2, waiting: float = 0.3, reports: int = 3) -> None:
        if not slower > 0 or not 0 < waiting <= 1 or reports < 1:
            raise TrainError(
                "Throughput() cannot watch for that.",
                evidence=[f"slower={slower!r}, waiting={waiting!r}, reports={reports!r}"],
                cure="slower above 0, waiting between 0 and 1, reports of 1 or more",
            )
        self._slower = slower
        self._waiting = waiting
        self._reports = reports
        self._slow: dict[int, int] = {}  # rank -> reports in a row
        self._starved = 0
        self._first: Report | None = None
        self._last: Report | None = None

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Begin anew."""
        self._slow, self._starved = {}, 0
        self._first = self._last = None

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Look at each rank's steps, and at the waiting."""
        self._first = self._first or report
        self._last = report
        excess = excess_of(report.step_s)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, one in enumerate(excess) if one > self._slower}
        for rank, times in self._slow.items():
            if times == self._reports:
                get_logger().warning(_slow_text(report, rank, excess[rank], trainer.session.hosts))
        self._starved = self._starved + 1 if report.data_wait > self._waiting else 0
        if self._starved == self._reports:
            get_logger().warning(
                "The ranks wait for data %.0f %% of the time. More workers (num_workers), or cheaper samples, would "
                "make training faster.",
                100 * report.data_wait,
            )

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Say how fast it was, without the first report: it has the warm-up in it."""
        first, last = self._first, self._last
        if first is None or last is None or last.seconds <= first.seconds:
            return
        speed = (last.samples - first.samples) / (last.seconds - first.seconds)
        get_logger().info(
            "%.0f samples/s from step %d to %d, evaluations and all else included", speed, first.step, last.step
        )


def excess_of(step_s: Sequence[float]) -> list[float]:
    """By how much each rank's step is longer than the median of the other ranks' steps: 0.2 is 20 %.

    Args:
        step_s: mean seconds per step, by rank.

    """
    # The others' median: with two ranks the median of all would have the slow one's half in it.
    others = [median([*step_s[:rank], *step_s[rank + 1 :]] or [one]) for rank, one in enumerate(step_s)]
    return [one / other - 1 if other > 0 else 0.0 for one, other in zip(step_s, others, strict=True)]


def _slow_text(report: Report, rank: int, excess: float, hosts: Sequence[str]) -> str:
    host = f" on {hosts[rank]}" if rank < len(hosts) else ""
    return (
        f"Rank {rank}{host} is slow, and all others wait for it: {1000 * report.step_s[rank]:.1f} ms a step, "
        f"{excess:.0%} more than the median of the others (step {report.step})."
    )
