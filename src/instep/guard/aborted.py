"""The last collective of ranks that have gone in it.

Where a peer goes, torch notes the collective of the others as ended, though it has failed: it is open again here. And
where gloo aborts a rank because it got more bytes than it had asked for, the rank's last record is lost with it.
What is left is the stack that the interpreter wrote in dying, gloo's own words, and the record of the others, which
were in the same collective: enough to put the lost record back, but for its size.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from instep.guard.flight import kind_of
from instep.guard.records import Frame, Group, Op, Snapshot, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.guard.verdicts import Verdict

_WORDS = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_UNKNOWN = -1  # a size
_ROUNDING = 16  # bytes
_OBJECTS = {
    "all_gather_object": "all_gather", "broadcast_object_list": "broadcast", "gather_object": "gather",
    "all_gather_into_tensor": "all_gather_into_tensor", "scatter_object_list": "scatter",
}  # fmt: skip


def completed(views: Sequence[View]) -> tuple[View, ...]:
    """The views, those of ranks that have gone in a collective with the record of it."""
    views = [_opened(view) for view in views]
    aborted = {view.rank for view in views if _WORDS.search(view.process.last_words)}
    if not aborted:
        return tuple(views)
    last = Counter(
        (op.group, op.index)
        for view in views
        if view.rank not in aborted and view.snapshot and view.snapshot.ops
        for op in [next((one for one in view.snapshot.ops if not one.done), view.snapshot.ops[-1])]
    )
    if not last:
        return tuple(views)
    (group, index), _ = min(last.items(), key=lambda item: (-item[1], item[0]))
    healthy = [view.snapshot for view in views if view.rank not in aborted and view.snapshot]
    ops = [op for snapshot in healthy for op in snapshot.ops if (op.group, op.index) == (group, index)]
    known = {one.name: one.members for snapshot in healthy for one in snapshot.beat.groups}
    asked = Group(group, known.get(group, tuple(view.rank for view in views)), index)
    return tuple(_with_record(view, asked, ops) if view.rank in aborted else view for view in views)


def _opened(view: View) -> View:
    """Of a rank that an exception from within a collective has ended: that collective has not been done."""
    snapshot = view.snapshot
    if snapshot is None or snapshot.last_raised is None or not snapshot.ops:
        return view
    frames, op = snapshot.last_raised.frames, snapshot.ops[-1]
    inside = bool(frames) and not frames[0].user and "/torch/" in frames[0].file
    places = [[(one.file, one.line) for one in stack if one.user] for stack in (frames, op.frames)]
    if not inside or not op.done or not places[0] or places[0] != places[1]:
        return view
    return replace(view, snapshot=replace(snapshot, ops=(*snapshot.ops[:-1], replace(op, done=False))))


def _sizes(view: View, others: Sequence[Op]) -> tuple[tuple[int, ...], ...]:
    """Those of another rank, where gloo's words fit to them and to nothing else.

    gloo counts the bytes of one message, a part of the tensor: what came is to what was asked for as the sender's size
    is to the aborted rank's own, but for the rounding of parts.
    """
    words = _WORDS.search(view.process.last_words)
    came, wanted = (int(words[1]), int(words[2])) if words else (0, 0)
    sizes = {op.sizes: sum(map(prod, op.sizes)) for op in others}
    fitting = {
        mine
        for mine, elements in sizes.items()
        for sent in sizes.values()
        if sent > elements and abs(came * elements / sent - wanted) <= _ROUNDING
    }
    return fitting.pop() if len(fitting) == 1 else ((_UNKNOWN,),)


def _with_record(view: View, asked: Group, others: Sequence[Op]) -> View:
    group, index = asked.name, asked.asked
    beat = view.beat
    ops = view.snapshot.ops if view.snapshot else ()
    known = [op.index for op in ops if op.group == group]
    kind = _kind(beat.stack) if beat else ""
    if beat is None or not kind or (known and max(known) >= index):
        return view
    beat = replace(beat, groups=(*(one for one in beat.groups if one.name != group), asked))
    op = Op(group, index, kind, _sizes(view, others), others[0].dtypes, done=False, frames=beat.stack)
    facts = view.snapshot.facts if view.snapshot else {}
    return replace(view, beat=beat, snapshot=Snapshot(beat, (*ops, op), beat.stack, facts=facts), age_s=view.silent_s)


def _kind(stack: Sequence[Frame]) -> str:
    """The collective in which the main thread was; in backward() it is DDP's."""
    kind = ""
    for frame in stack:
        if frame.user:
            break
        if frame.file.endswith("/distributed_c10d.py"):
            kind = _OBJECTS.get(frame.function, frame.function)
            break
        if "/torch/autograd/" in frame.file:
            kind = "all_reduce"
    return kind_of(kind)


def explained(verdict: Verdict | None, views: Sequence[View]) -> Verdict | None:
    """The verdict with gloo's words; a size that nobody knows is none."""
    told = [(view.rank, found) for view in views if (found := _WORDS.search(view.process.last_words))]
    if verdict is None or not told:
        return verdict
    evidence = tuple(
        f"gloo ended rank {rank} because the sizes differ: it got {found[1]} bytes where it had asked for {found[2]}"
        for rank, found in told
    )
    hidden = f"[{_UNKNOWN}]"
    return replace(
        verdict,
        reason=verdict.reason.replace(hidden, "[another size]"),
        evidence=(*(line.replace(hidden, "[another size]") for line in verdict.evidence), *evidence),
        waiting=tuple(replace(one, shape=None) if one.shape == (_UNKNOWN,) else one for one in verdict.waiting),
    )
