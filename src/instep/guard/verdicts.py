"""What the watch says: a verdict with its evidence, or a suspicion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["mismatch", "missing", "extra", "cycle", "dead", "blocked"]


@dataclass(frozen=True)
class LeftAt:
    """The line where a rank left the common path.

    Attributes:
        file: absolute path.
        line: from 1.
        function: its name.
        source: the line, or the head of the statement.
        why: what kind of place it is, in words: "this branch was taken", "this loop ended earlier", ...

    """

    file: str
    line: int
    function: str
    source: str
    why: str = ""


@dataclass(frozen=True)
class Waiting:
    """Where a rank waits, or stands.

    Attributes:
        rank: of the world.
        op: "all_reduce"; "" where it is in no collective.
        index: of the operation in its group.
        shape: of its first tensor.
        dtype: of its first tensor.
        group: the group's name.
        file: of the user's line it stands at.
        line: that line.
        source: its text.

    """

    rank: int
    op: str
    index: int | None
    shape: tuple[int, ...] | None
    dtype: str
    group: str
    file: str
    line: int
    source: str = ""


@dataclass(frozen=True)
class Verdict:
    """Ranks are out of step.

    Attributes:
        kind: what happened.
        proven: whether it is certain; otherwise a suspicion, which needs time to become a reason to end the job.
        ranks: those out of step; in a world of two both, where nothing tells them apart.
        left_at: the line, None where it cannot be had.
        values: what the condition of that line was, by rank, where known.
        waiting: where all ranks are.
        reason: one sentence for people.
        evidence: further lines for people.
        silent: no rank waits: a fault that passes unnoticed.

    """

    kind: Kind
    proven: bool
    ranks: tuple[int, ...]
    left_at: LeftAt | None = None
    values: dict[int, str] = field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    reason: str = ""
    evidence: tuple[str, ...] = ()
    silent: bool = False
