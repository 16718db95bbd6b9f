"""The verdict over all ranks: a pure function of what is known of them.

What is proven needs no time: the same collective that differs between ranks, one that has ended while others wait for
it, a ring of waits. What stands still without proof is a suspicion; what works is never one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from instep.guard import proofs, suspicions, waits as waiting
from instep.guard.job import Job
from instep.guard.verdicts import Verdict, Waiting
from instep.guard.words import they_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from instep.guard.alignment import State
    from instep.guard.records import View
    from instep.guard.waits import Wait

_CHECKS = (
    proofs.mismatch,
    proofs.gone,
    proofs.ring,
    suspicions.joining,
    suspicions.behind,
    suspicions.roots,
    suspicions.silent,
)


def read_text(path: str) -> str | None:
    """A source file's text, None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def judge(views: Sequence[View], read: Callable[[str], str | None] = read_text) -> Verdict | None:
    """Whether the ranks of a job are out of step.

    Args:
        views: of all ranks.
        read: gives the text of a source file, None where it cannot be had.

    Returns:
        None where nothing is wrong, or where a rank that the others wait for is at work.

    """
    if len(views) < 2:
        return None
    job = Job(views, read)
    found = next((verdict for check in _CHECKS if (verdict := check(job)) is not None), None)
    return found if found is None else replace(found, waiting=tuple(_place(job, one) for one in job.states))


def waits(views: Sequence[View], read: Callable[[str], str | None] = read_text) -> list[str]:
    """Who waits for whom, in words for the screen, longest first."""
    job = Job(views, read)
    by_late: dict[int, list[Wait]] = {}
    for wait in job.waits.values():
        for need in wait.needs - set(job.waits) - job.ended:
            by_late.setdefault(need, []).append(wait)
    lines = []
    for rank, found in sorted(by_late.items()):
        since = max(waiting.stands_s(job.of[wait.rank]) for wait in found)
        frame = job.of[rank].here()
        at = f" at {Path(frame.file).name}:{frame.line}" if frame else ""
        does = "is stopped" if waiting.is_stopped(job.of[rank]) else "works"
        waiters = sorted(wait.rank for wait in found)
        lines.append(f"rank {rank} {does}{at}, {they_wait(waiters)} for it since {since:.0f} s")
    return lines


def _place(job: Job, one: State) -> Waiting:
    """Where a rank is."""
    wait = job.waits.get(one.rank)
    op = wait.op if wait else None
    if op is None and one.ended != "finished":
        open_ops = [other for _, other in one.order if not other.done]
        op = open_ops[0] if open_ops and (one.secondary or one.ended or not one.stack) else None
    frame = (op.user_site() if op else None) or one.here()
    file, line = (frame.file, frame.line) if frame else ("", 0)
    source = job.sources.line(file, line) if frame else ""
    if op is None:
        name = wait.what if wait else ""
        return Waiting(one.rank, name, None, None, "", wait.via if wait else "", file, line, source)
    shape = op.sizes[0] if op.sizes else None
    dtype = op.dtypes[0] if op.dtypes else ""
    return Waiting(one.rank, op.kind, op.index, shape, dtype, op.group, file, line, source)
