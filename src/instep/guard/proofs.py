"""What is proven, and needs no time.

The same collective that differs between ranks, one that has ended while others wait for it, a ring of waits.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from instep.guard import alignment, waits as waiting
from instep.guard.alignment import Unlike, site
from instep.guard.job import two_sides
from instep.guard.verdicts import Kind, Verdict
from instep.guard.words import exit_words, name_ranks, op_words, they_wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instep.guard.alignment import State
    from instep.guard.job import Job
    from instep.guard.locate import Parting
    from instep.guard.records import Frame

_LONGER = re.compile(r"preamble\.length <= op\.nbytes")


def mismatch(job: Job) -> Verdict | None:
    """The same collective is not the same on all ranks."""
    found: list[Unlike] = []
    for key in alignment.groups(job.states):
        one = alignment.first_unlike(job.states, key)
        if one is not None:
            found.append(one)
    if not found:
        return None
    unlike = _with_aborted(job, min(found, key=_asked_at))
    earlier = alignment.first_apart(job.states, unlike.key, before=unlike.index)
    sides = earlier.sites if earlier else alignment.classes(unlike.ops)
    ops = earlier.ops if earlier else unlike.ops
    index = earlier.index if earlier else unlike.index
    healthy, culprits = two_sides(sides)
    parting = job.part_ops(unlike.key, index, ops, healthy, culprits)
    ranks = job.blame(sides, parting)
    classes = alignment.classes(unlike.ops)
    words = " and ".join(f"{op_words(unlike.ops[one[0]])} on {name_ranks(one)}" for one in classes)
    reason = f"the collective #{unlike.index} of {job.group(unlike.key)} is not the same on all ranks: {words}"
    evidence = [f"they differ in their {unlike.what}"]
    if earlier:
        evidence.append(f"already #{earlier.index} was called from unlike lines: {job.sites(earlier)}")
    return job.verdict("mismatch", True, ranks, parting, reason, evidence, silent=not _anyone_waits(job, unlike))


def _with_aborted(job: Job, unlike: Unlike) -> Unlike:
    """Add the ranks that gloo ended in this collective before they could tell: they got more than they expected."""
    if unlike.what not in {"size", "dtype"}:
        return unlike
    ops = dict(unlike.ops)
    least = min(unlike.ops.values(), key=alignment.byte_count)
    for one in job.states:
        if one.rank in unlike.key[1] and one.rank not in ops and _aborted(one):
            ops[one.rank] = least
    return replace(unlike, ops=ops)


def _asked_at(unlike: Unlike) -> int:
    return min(op.time_ns for op in unlike.ops.values())


def _anyone_waits(job: Job, unlike: Unlike) -> bool:
    if all(one.ended == "finished" for one in job.states):
        return False
    if any(one.ended in {"failed", "killed"} for one in job.states):
        return True
    return any(not op.done and job.of[rank].still_s >= 0.25 for rank, op in unlike.ops.items()) or bool(
        waiting.stuck(job.waits, job.ended)
    )


def gone(job: Job) -> Verdict | None:
    """A rank has ended, and others wait for it."""
    if not job.ended:
        return None
    victims = {one.rank for one in job.states if one.secondary}
    victims |= {rank for rank, wait in job.waits.items() if wait.needs & job.ended and wait.every}
    victims |= waiting.stuck(job.waits, job.ended)
    if not victims:
        return None
    worse = [rank for rank in sorted(job.ended) if job.of[rank].ended != "finished"]
    if worse:
        return _dead(job, worse, victims)
    return _left(job, sorted(job.ended), sorted(victims))


def _dead(job: Job, ranks: Sequence[int], victims: Iterable[int]) -> Verdict:
    state = job.of[ranks[0]]
    if (found := _unequal_sizes(job, ranks, sorted(victims))) is not None:
        return found
    error = state.error
    frames = error.frames if error else state.stack
    frame = next((one for one in frames if one.user), None)
    why = f"{error.kind} was raised here" if error else "it stood here shortly before it was ended"
    left_at = job.place(frame, why)
    code = state.view.process.exit_code
    how = f"failed with {error.kind}: {error.text}" if error else exit_words(code)
    reason = f"{name_ranks(ranks)} {how}, while {name_ranks(sorted(victims))} wait for it"
    return Verdict("dead", True, tuple(ranks), left_at, reason=reason)


def _unequal_sizes(job: Job, ranks: Sequence[int], victims: Sequence[int]) -> Verdict | None:
    """A process that gets more bytes than it expects is ended by gloo; its last words say so."""
    told = [rank for rank in ranks if _LONGER.search(job.of[rank].view.process.last_words)]
    if not told:
        return None
    op = next((op for rank in victims if (op := job.last_op(rank)) is not None), None)
    frame = (op.user_site() if op else None) or job.of[told[0]].here()
    left_at = job.place(frame, "the same call with unlike sizes")
    words = f" in {op_words(op)}" if op else ""
    reason = f"{name_ranks(told)} got more bytes from another rank than it expected{words}, and was ended by gloo"
    everyone = tuple(one.rank for one in job.states) if len(job.states) == 2 else tuple(told)
    return Verdict("mismatch", True, everyone, left_at, reason=reason)


def _left(job: Job, left: Sequence[int], victims: Sequence[int]) -> Verdict:
    """Ranks that came to the end of the program while others were in a collective."""
    key, apart = job.apart_before(left, victims)
    rank = next((one for one in victims if one in job.waits and job.waits[one].op), victims[0])
    wait = job.waits.get(rank)
    op = wait.op if wait and wait.op else job.last_op(rank)
    place = op.frames if op else job.of[rank].stack
    sides = sorted([list(left), list(victims)], key=lambda one: (-len(one), one))
    if apart is not None and key is not None:
        sides = apart.sites
        healthy, culprits = two_sides(sides)
        parting = job.part_ops(key, apart.index, apart.ops, healthy, culprits)
    elif len(left) > len(victims):
        parting = job.locator.part(job.last_common(rank, left[0]), _end(job, left[0]), place, left, victims)
    else:
        parting = job.locator.part(job.last_common(rank, left[0]), place, _end(job, left[0]), victims, left)
    if apart is None and len(left) == len(victims) and not (parting and parting.leavers):
        ranks = tuple(left)
    else:
        ranks = job.blame(sides, parting)
    kind: Kind = "missing" if set(ranks) & set(left) else "extra"
    words = f"{op.kind} #{op.index}" if op else "an exchange"
    reason = f"{name_ranks(left)} came to the end of the program while {they_wait(victims)} in {words}"
    return job.verdict(kind, True, ranks, parting, reason, [])


def _end(job: Job, rank: int) -> tuple[Frame, ...]:
    """The stack at which a rank ended its program; empty where it came to its last line."""
    error = job.of[rank].error
    return error.frames if error is not None and error.kind.endswith("SystemExit") else ()


def ring(job: Job) -> Verdict | None:
    """Ranks wait for one another."""
    inside = waiting.stuck(job.waits, ())
    if not inside or not _at_once(job, inside):
        return None
    proven = all(job.waits[rank].certain for rank in inside)
    if any(not job.waits[rank].every for rank in inside):
        proven = proven and min(waiting.stands_s(job.of[rank]) for rank in inside) >= 2.0
    parting, ranks = _ring_parts(job, inside)
    storing = [rank for rank in sorted(inside) if job.waits[rank].via == "store"]
    if storing and len(storing) < len(inside):
        return _at_store(job, storing, sorted(inside - set(storing)), proven=proven)
    words = "; ".join(
        f"rank {rank} waits in {job.waits[rank].what} for {name_ranks(sorted(job.waits[rank].needs))}"
        for rank in sorted(inside)
    )
    return job.verdict("cycle", proven, ranks, parting, f"the ranks wait for one another: {words}", [])


def _ring_parts(job: Job, inside: set[int]) -> tuple[Parting | None, tuple[int, ...]]:
    """Where the ranks of a ring parted, and who is to blame."""
    key, apart = job.apart_before(inside, inside)
    if apart is not None and key is not None:
        healthy, culprits = two_sides(apart.sites)
        parting = job.part_ops(key, apart.index, apart.ops, healthy, culprits)
        return parting, job.blame(apart.sites, parting)
    before, places = _fork_of_orders(job, inside)
    by_site: dict[object, list[int]] = {}
    for rank in sorted(inside):
        by_site.setdefault(site(places[rank]), []).append(rank)
    sides = sorted(by_site.values(), key=lambda one: (-len(one), one))
    if len(sides) > 1:
        healthy, culprits = two_sides(sides)
        parting = job.locator.part(before, places[healthy[0]], places[culprits[0]], healthy, culprits)
        return parting, job.blame(sides, parting)
    frames = places[sides[0][0]]
    return job.locator.part(None, frames, frames, sides[0][:1], sides[0][1:]), tuple(sorted(_core(job, inside)))


def _fork_of_orders(job: Job, inside: set[int]) -> tuple[tuple[Frame, ...] | None, dict[int, tuple[Frame, ...]]]:
    """The longest common beginning of what the ranks called, whatever the groups: its last place, and the next.

    Where that does not single anybody out, the last collective in common, and where each rank stands.
    """
    orders = {rank: [op.frames for _, op in job.of[rank].order] for rank in inside}
    whole = all(job.of[rank].order and job.of[rank].order[0][1].index == 1 for rank in inside)
    if whole:
        for rank, wait in ((rank, job.waits[rank]) for rank in inside):
            if wait.op is None:
                orders[rank].append(job.of[rank].stack)
        for at in range(min(len(one) for one in orders.values())):
            sites = Counter(site(one[at]) for one in orders.values())
            if len(sites) == 1:
                continue
            counts = [count for _, count in sites.most_common(2)]
            if counts[0] > counts[1] and counts[0] + 1 >= len(inside):
                before = next(iter(orders.values()))[at - 1] if at else None
                return before, {rank: one[at] for rank, one in orders.items()}
            break
    standing = {rank: job.standing(rank) for rank in inside}
    sites = Counter(site(frames) for frames in standing.values())
    most = sites.most_common(1)[0][0]
    healthy = min(rank for rank in inside if site(standing[rank]) == most)
    others = [rank for rank in sorted(inside) if site(standing[rank]) != most]
    return (job.last_common(healthy, others[0]) if others else None), standing


def _at_store(job: Job, ranks: Sequence[int], waiters: Sequence[int], *, proven: bool) -> Verdict:
    """A rank waits for a key that only ranks that wait for it could set."""
    frame = job.of[ranks[0]].here()
    left_at = job.place(frame, "it waits here for a key that nobody sets")
    what = job.waits[ranks[0]].what
    reason = f"{they_wait(ranks)} in {what} for a key, and {they_wait(waiters)} for it"
    return Verdict("blocked", proven, tuple(ranks), left_at, reason=reason)


def _core(job: Job, inside: set[int]) -> set[int]:
    """The ring itself, without those that only wait for one of it."""
    core = set(inside)
    while True:
        needed = {need for rank in core for need in job.waits[rank].needs}
        if core <= needed:
            return core
        core &= needed


def _at_once(job: Job, ranks: Iterable[int]) -> bool:
    """Whether they stood at one common moment, by what is known of each."""
    spans = []
    for rank in ranks:
        state = job.of[rank]
        if waiting.stands_s(state) < 0.25:
            return False
        spans.append((-state.seen_s - state.still_s, -state.seen_s if state.view.silent_s <= 1.0 else 0.0))
    return max(begin for begin, _ in spans) <= min(end for _, end in spans) + 0.05


def _aborted(one: State) -> bool:
    """Whether it was ended by an abort(), as gloo does."""
    return one.ended == "killed" and one.view.process.exit_code in {134, -6}
