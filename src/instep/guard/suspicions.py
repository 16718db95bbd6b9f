"""What is only suspected, and needs time, and what passes in silence.

What stands still without proof is a suspicion; what works is never one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from instep.guard import alignment, facts, waits as waiting
from instep.guard.alignment import State, own, site
from instep.guard.conditions import UNKNOWN, evaluate
from instep.guard.job import STILL_S, two_sides
from instep.guard.syntax import called, calls, head
from instep.guard.verdicts import Kind, Verdict
from instep.guard.words import name_ranks, they_wait

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from instep.guard.job import Job
    from instep.guard.locate import Parting
    from instep.guard.records import Frame


def behind(job: Job) -> Verdict | None:
    """A rank that others wait for does not come."""
    late = {need for wait in job.waits.values() for need in wait.needs if wait.every}
    late -= set(job.waits) | job.ended
    late = {rank for rank in late if job.of[rank].ended is None}
    if not late:
        return None
    states = [job.of[rank] for rank in sorted(late)]
    if any(waiting.is_busy(one) or waiting.stands_s(one) < STILL_S for one in states):
        return None
    if any(waiting.is_stopped(one) or waiting.is_silent(one) for one in states):
        return _blocked(job, states, sorted(rank for rank, wait in job.waits.items() if wait.needs & late))
    if any(one.here() is None for one in states):
        return None
    waiters = sorted(rank for rank, wait in job.waits.items() if wait.needs & late)
    goal = job.standing(waiters[0])
    ranks = [one.rank for one in states]
    if not all(job.locator.may_come(one.stack, goal) for one in states):
        return _lost(job, ranks, waiters, goal)
    return _blocked(job, states, waiters)


def _lost(job: Job, late: Sequence[int], waiters: Sequence[int], goal: Sequence[Frame]) -> Verdict:
    """They stand where no way leads to the collective that the others wait in."""
    key, apart = job.apart_before(late, waiters)
    sides = sorted([list(late), list(waiters)], key=lambda one: (-len(one), one))
    stack = job.of[late[0]].stack
    before = job.last_common(waiters[0], late[0])
    if apart is not None and key is not None:
        sides = apart.sites
        healthy, culprits = two_sides(sides)
        parting = job.part_ops(key, apart.index, apart.ops, healthy, culprits)
    elif len(late) > len(waiters):
        parting = job.locator.part(before, stack, goal, late, waiters)
    else:
        parting = job.locator.part(before, goal, stack, waiters, late)
    ranks = job.blame(sides, parting) if len(late) != len(waiters) or apart or _shows(parting) else tuple(late)
    kind: Kind = "missing" if set(ranks) & set(late) else "extra"
    what = job.waits[waiters[0]].what
    reason = f"{they_wait(waiters)} in {what}, where {name_ranks(late)} will not come any more"
    return job.verdict(kind, False, ranks, parting, reason, [])


def _blocked(job: Job, states: Sequence[State], waiters: Sequence[int]) -> Verdict | None:
    reasons = {}
    for one in states:
        word = waiting.halted_in(one) or waiting.blocked_in(one, job.sources)
        if word is None:
            return None
        reasons[one.rank] = word
    first = states[0]
    frame = first.here()
    halted = waiting.halted_in(first)
    why = "it was last seen here" if halted else "it is blocked here; it has not left the common path"
    left_at = job.place(frame, why)
    ranks = tuple(one.rank for one in states)
    come = "does not come" if len(ranks) == 1 else "do not come"
    reason = f"{name_ranks(ranks)} {come}: {reasons[first.rank]}; {they_wait(waiters)} for it"
    return Verdict("blocked", False, ranks, left_at, reason=reason)


def joining(job: Job) -> Verdict | None:
    """Ranks that stand where the world is made: who has another idea of it, or else all of them."""
    inside = [one for one in job.states if one.ended is None and waiting.is_joining(one)]
    if not inside or any(waiting.is_busy(one) or waiting.stands_s(one) < STILL_S for one in inside):
        return None
    told = {one.rank: [waiting.argument(one, word) for word in ("group_rank", "group_size")] for one in inside}
    ranks = tuple(rank for rank, one in told.items() if None not in one and one != [rank, len(job.states)])
    if not ranks and len(inside) < len(job.states):
        return None
    ranks = ranks or tuple(told)
    frame = job.of[ranks[0]].here()
    left_at = job.place(frame, "the ranks do not come together here")
    values = {rank: f"rank {one[0]} of {one[1]}" for rank, one in told.items() if None not in one}
    words = "; ".join(f"rank {rank} joins as {text}" for rank, text in values.items())
    reason = f"{they_wait(sorted(told))} for the others to join"
    reason += f": {words}" if words else ""
    return Verdict("blocked", False, ranks, left_at, values, reason=reason)


def roots(job: Job) -> Verdict | None:
    """All ranks stand in the same collective, each with a root of its own."""
    if len(job.waits) < 2:
        return None
    found = {rank: _root(job, rank) for rank in job.waits}
    known = {rank: root for rank, root in found.items() if root is not None}
    places = {site(job.of[rank].stack) for rank in known}
    if len(known) < 2 or len(places) != 1 or len({root for _, root in known.values()}) < 2:
        return None
    counts = Counter(root for _, root in known.values())
    most = counts.most_common(2)
    majority = most[0][0] if len(most) < 2 or most[0][1] > most[1][1] else None
    ranks = tuple(sorted(rank for rank, (_, root) in known.items() if root != majority))
    frame = job.of[ranks[0]].here()
    values = {rank: f"{word} = {root}" for rank, (word, root) in known.items()}
    left_at = job.place(frame, "each rank names another root")
    words = ", ".join(f"{root} on {name_ranks([r for r, (_, x) in known.items() if x == root])}" for root in counts)
    reason = f"the ranks do not agree on the root: {words}"
    return Verdict("mismatch", False, ranks, left_at, values, reason=reason)


def _root(job: Job, rank: int) -> tuple[str, int] | None:
    """The root that a rank names: the argument's name and value."""
    state = job.of[rank]
    frame = state.here()
    stmt = job.sources.statement(frame.file, frame.line) if frame else None
    if frame is None or stmt is None or waiting.stands_s(state) < STILL_S:
        return None
    places = {"broadcast": ("src", 1), "reduce": ("dst", 1), "gather": ("dst", 2), "scatter": ("src", 2)}
    for call, _ in calls(head(stmt)):
        name = called(call).removesuffix("_object_list").removesuffix("_object")
        if name not in places:
            continue
        word, position = places[name]
        if (known := waiting.argument(state, word)) is not None:
            return word, known
        given: list[ast.expr] = [one.value for one in call.keywords if one.arg in {word, f"group_{word}"}]
        given = given or list(call.args[position : position + 1])
        values = state.values(frame.file, own(frame.function))
        root = evaluate(given[0], values, rank, len(job.states)) if given else UNKNOWN
        return (word, root) if isinstance(root, int) else None
    return None


def silent(job: Job) -> Verdict | None:
    """No rank waits, and yet they do not do the same."""
    for key in alignment.groups(job.states):
        apart = alignment.first_apart(job.states, key)
        if apart is None:
            continue
        healthy, culprits = two_sides(apart.sites)
        parting = job.part_ops(key, apart.index, apart.ops, healthy, culprits)
        places = job.sites(apart)
        reason = f"the collective #{apart.index} of {job.group(key)} pairs calls from unlike lines: {places}"
        ranks = job.blame(apart.sites, parting)
        return job.verdict("mismatch", False, ranks, parting, reason, [], silent=True)
    return _facts(job)


def _facts(job: Job) -> Verdict | None:
    for name in sorted({name for one in job.states for name in one.facts}):
        if facts.may_differ(name):
            continue
        have = {one.rank: one.facts[name] for one in job.states if name in one.facts}
        if len(have) < 2 or len(set(have.values())) < 2:
            continue
        counts = Counter(have.values()).most_common()
        clear = len(counts) < 2 or counts[0][1] > counts[1][1]
        ranks = tuple(sorted(rank for rank, value in have.items() if not clear or value != counts[0][0]))
        words = ", ".join(f"{value} on {name_ranks([r for r, v in have.items() if v == value])}" for value, _ in counts)
        values = {rank: f"{name}: {value}" for rank, value in have.items()}
        return Verdict("mismatch", False, ranks, None, values, reason=f"{name} differs: {words}", silent=True)
    return None


def _shows(parting: Parting | None) -> bool:
    return parting is not None and bool(parting.leavers)
