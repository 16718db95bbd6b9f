"""How a run ended, and the exit code that says so. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: saved, start me again
EXIT_OUT_OF_STEP = 86


class Outcome(str, Enum):
    """The word that stands in ``run.json``."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"
    OUT_OF_STEP = "out of step"
    INTERRUPTED = "interrupted"


def exit_code_of(status: int) -> int:
    """The shell's exit code for a process status in which -N means "ended by signal N"."""
    return status if status >= 0 else 128 - status


def judge(
    exit_codes: Iterable[int], *, first_failure: int | None = None, signal: int | None = None
) -> tuple[Outcome, int]:
    """The outcome of a run whose processes have all gone, and its exit code.

    Args:
        exit_codes: of every rank, 128 + N for signal N.
        first_failure: exit code of the rank that failed first, where one failed.
        signal: the signal by which somebody asked the whole run to end.

    """
    codes = set(exit_codes)
    if first_failure is not None:
        outcome = Outcome.OUT_OF_STEP if first_failure == EXIT_OUT_OF_STEP else Outcome.FAILED
        return outcome, first_failure
    if EXIT_PREEMPTED in codes and codes <= {0, EXIT_PREEMPTED}:
        return Outcome.PREEMPTED, EXIT_PREEMPTED
    if signal is not None:
        return Outcome.INTERRUPTED, 128 + signal
    worst = next((code for code in sorted(codes) if code not in {0, EXIT_PREEMPTED}), 0)
    return (Outcome.FAILED, worst) if worst else (Outcome.FINISHED, 0)
