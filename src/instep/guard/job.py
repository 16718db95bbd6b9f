"""What is known of all ranks of a job, side by side, and what every judgement asks of it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from instep.guard import alignment, waits as waiting
from instep.guard.alignment import Apart, Key, own, site
from instep.guard.locate import Locator, Parting
from instep.guard.verdicts import Kind, LeftAt, Verdict
from instep.guard.words import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from instep.guard.records import Frame, Op, View

STILL_S = 1.0  # a rank that sleeps for less is not looked at


class Job:
    """All ranks of a job.

    Args:
        views: of all ranks.
        read: gives the text of a source file, None where it cannot be had.

    """

    def __init__(self, views: Sequence[View], read: Callable[[str], str | None]) -> None:
        self.states = [alignment.state(view) for view in sorted(views, key=lambda one: one.rank)]
        self.of = {one.rank: one for one in self.states}
        self.locator = Locator(read, self.of)
        self.sources = self.locator.sources
        self.waits = waiting.waits(self.states, self.sources)
        self.ended = {one.rank for one in self.states if one.ended is not None and not one.secondary}

    # Where they parted

    def part_ops(
        self, key: Key, index: int, ops: Mapping[int, Op], healthy: Sequence[int], culprits: Sequence[int]
    ) -> Parting | None:
        """Between two operations at the same index."""
        one, other = ops[healthy[0]], ops[culprits[0]]
        shifted = site(one.frames) == site(other.frames) and self._other_trip(key, one, other, healthy[0], culprits[0])
        return self.locator.part(
            self._before(key, index, healthy[0], culprits[0]),
            one.frames,
            other.frames,
            healthy,
            culprits,
            shifted=shifted,
        )

    def _other_trip(self, key: Key, one: Op, other: Op, healthy: int, culprit: int) -> bool:
        """Whether two unlike operations of one line are of unlike trips: what one does there the other has done."""
        place = site(one.frames)
        for mine, theirs, rank in ((other, one, healthy), (one, other, culprit)):
            done = [
                op for op in self.of[rank].ops.get(key, {}).values() if site(op.frames) == place and op is not theirs
            ]
            if any((op.kind, op.sizes, op.dtypes) == (mine.kind, mine.sizes, mine.dtypes) for op in done):
                return True
        texts = []
        for rank in (healthy, culprit):
            frame = self.of[rank].here()
            if frame is None or (frame.file, own(frame.function), frame.line) != place[-1]:
                return False
            texts.append(frame)
        return _loop_values_differ(self.locator, texts[0], texts[1])

    def _before(self, key: Key, index: int, healthy: int, culprit: int) -> tuple[Frame, ...] | None:
        """The last collective before an index that both ranks called from the same place."""
        mine, theirs = self.of[healthy].ops.get(key, {}), self.of[culprit].ops.get(key, {})
        at = next((op for other_key, op in self.of[healthy].order if other_key == key and op.index == index), None)
        for other_key, op in reversed(self._until(healthy, at)):
            twin = self.of[culprit].ops.get(other_key, {}).get(op.index)
            if twin is not None and site(twin.frames) == site(op.frames) and site(op.frames):
                return op.frames
        for before in range(index - 1, 0, -1):
            if before in mine and before in theirs and site(mine[before].frames) == site(theirs[before].frames):
                return mine[before].frames
        return None

    def _until(self, rank: int, op: Op | None) -> list[tuple[Key, Op]]:
        order = self.of[rank].order
        places = [at for at, (_, one) in enumerate(order) if one is op]
        return order[: places[0]] if places else order

    def last_common(self, healthy: int, culprit: int) -> tuple[Frame, ...] | None:
        """The last collective of any group that both have called, in the healthy rank's order."""
        for key, op in reversed(self.of[healthy].order):
            twin = self.of[culprit].ops.get(key, {}).get(op.index)
            if twin is not None and site(twin.frames) == site(op.frames) and site(op.frames):
                return op.frames
        return None

    def blame(self, sides: Sequence[Sequence[int]], parting: Parting | None) -> tuple[int, ...]:
        """Who is wrong: all but the majority; where there is none, whom the line shows, else all."""
        most = [one for one in sides if len(one) == len(sides[0])]
        if len(most) == 1:
            return tuple(sorted(rank for one in sides[1:] for rank in one))
        if parting is not None and parting.leavers:
            return tuple(sorted(parting.leavers))
        handling = [rank for one in sides for rank in one if self.of[rank].handled]
        if handling and len(handling) < sum(len(one) for one in sides):
            return tuple(sorted(handling))
        return tuple(sorted(rank for one in most for rank in one))

    def last_op(self, rank: int) -> Op | None:
        """The collective that a rank is in, else its last one."""
        order = self.of[rank].order
        open_ops = [op for _, op in order if not op.done]
        return open_ops[0] if open_ops else order[-1][1] if order else None

    def apart_before(self, some: Iterable[int], others: Iterable[int]) -> tuple[Key | None, Apart | None]:
        """An earlier index that was called from unlike lines, by some here and others there."""
        for key in alignment.groups(self.states):
            apart = alignment.first_apart(self.states, key)
            if apart is not None and set(apart.ops) & set(some) and set(apart.ops) & set(others):
                return key, apart
        return None, None

    def standing(self, rank: int) -> tuple[Frame, ...]:
        """The stack of the collective that a rank waits in, else its present one."""
        wait = self.waits.get(rank)
        return wait.op.frames if wait and wait.op and wait.op.frames else self.of[rank].stack

    def sites(self, apart: Apart) -> str:
        """From which lines one collective was called, and by whom."""
        words = []
        for ranks in apart.sites:
            place = apart.ops[ranks[0]].user_site()
            if place is not None:
                words.append(f"{Path(place.file).name}:{place.line} on {name_ranks(ranks)}")
        return ", ".join(words)

    # What is said

    def verdict(  # noqa: PLR0917
        self,
        kind: Kind,
        proven: bool,
        ranks: tuple[int, ...],
        parting: Parting | None,
        reason: str,
        evidence: Sequence[str],
        *,
        silent: bool = False,
    ) -> Verdict:
        """A verdict with what is known of the line."""
        left_at = parting.left_at if parting else None
        values = parting.values if parting else {}
        more = parting.evidence if parting else ("the line where they parted cannot be told",)
        return Verdict(kind, proven, ranks, left_at, values, (), reason, (*evidence, *more), silent)

    def place(self, frame: Frame | None, why: str) -> LeftAt | None:
        """A frame's line, and why it is shown."""
        if frame is None:
            return None
        return LeftAt(frame.file, frame.line, own(frame.function), self.sources.line(frame.file, frame.line), why)

    def group(self, key: Key) -> str:
        """A group in words."""
        return "all ranks" if len(key[1]) == len(self.states) else f"group {key[0]} ({name_ranks(key[1])})"


def two_sides(sides: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The largest class as the healthy one, all others as culprits."""
    return list(sides[0]), [rank for one in sides[1:] for rank in one]


def _loop_values_differ(locator: Locator, one: Frame, other: Frame) -> bool:
    """Whether two ranks at one line are in unlike trips of a loop around it, by the loop's own variables."""
    tree = locator.sources.tree(one.file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.For) and node.lineno <= one.line <= (node.end_lineno or node.lineno):
            for target in ast.walk(node.target):
                if isinstance(target, ast.Name):
                    texts = (one.values.get(target.id), other.values.get(target.id))
                    if None not in texts and texts[0] != texts[1]:
                        return True
    return False
