"""The verdict over all ranks: a pure function of what is known of them.

What is proven needs no time: the same collective that differs between ranks, one that has ended while others wait for
it, a ring of waits. What stands still without proof is a suspicion; what works is never one.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from instep.guard import alignment, facts, waits as waiting
from instep.guard.alignment import Apart, Key, State, Unlike, own, site
from instep.guard.conditions import UNKNOWN, evaluate
from instep.guard.locate import Locator, Parting
from instep.guard.syntax import called, calls, head
from instep.guard.verdicts import Kind, LeftAt, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from instep.guard.records import Frame, Op, View
    from instep.guard.waits import Wait

_STILL_S = 1.0  # a rank that sleeps for less is not looked at


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
    return _Judge(views, read).verdict() if len(views) > 1 else None


def waits(views: Sequence[View], read: Callable[[str], str | None] = read_text) -> list[str]:
    """Who waits for whom, in words for the screen, longest first."""
    return _Judge(views, read).notes()


class _Judge:
    def __init__(self, views: Sequence[View], read: Callable[[str], str | None]) -> None:
        self.states = [alignment.state(view) for view in sorted(views, key=lambda one: one.rank)]
        self.of = {one.rank: one for one in self.states}
        self.locator = Locator(read, self.of)
        self.sources = self.locator.sources
        self.waits = waiting.waits(self.states, self.sources)
        self.ended = {one.rank for one in self.states if one.ended is not None and not one.secondary}

    def verdict(self) -> Verdict | None:
        found = self.mismatch() or self.gone() or self.ring()
        found = found or self.joining() or self.behind() or self.roots() or self.silent()
        return found if found is None else replace(found, waiting=self.places())

    # Proof: the same collective is not the same

    def mismatch(self) -> Verdict | None:
        found: list[Unlike] = []
        for key in alignment.groups(self.states):
            one = alignment.first_unlike(self.states, key)
            if one is not None:
                found.append(one)
        if not found:
            return None
        unlike = self._with_aborted(min(found, key=self._asked_at))
        earlier = alignment.first_apart(self.states, unlike.key, before=unlike.index)
        sides = earlier.sites if earlier else alignment.classes(unlike.ops)
        ops = earlier.ops if earlier else unlike.ops
        index = earlier.index if earlier else unlike.index
        healthy, culprits = _sides(sides)
        parting = self._part_ops(unlike.key, index, ops, healthy, culprits)
        ranks = self._blame(sides, parting)
        classes = alignment.classes(unlike.ops)
        words = " and ".join(f"{_op_words(unlike.ops[one[0]])} on {_ranks(one)}" for one in classes)
        reason = f"the collective #{unlike.index} of {self._group(unlike.key)} is not the same on all ranks: {words}"
        evidence = [f"they differ in their {unlike.what}"]
        if earlier:
            evidence.append(f"already #{earlier.index} was called from unlike lines: {self._sites(earlier)}")
        return self._made("mismatch", True, ranks, parting, reason, evidence, silent=not self._anyone_waits(unlike))

    def _with_aborted(self, unlike: Unlike) -> Unlike:
        """Add the ranks that gloo ended in this collective before they could tell: they got more than they expected."""
        if unlike.what not in {"size", "dtype"}:
            return unlike
        ops = dict(unlike.ops)
        least = min(unlike.ops.values(), key=alignment.byte_count)
        for one in self.states:
            if one.rank in unlike.key[1] and one.rank not in ops and _aborted(one):
                ops[one.rank] = least
        return replace(unlike, ops=ops)

    def _asked_at(self, unlike: Unlike) -> int:
        return min(op.time_ns for op in unlike.ops.values())

    def _anyone_waits(self, unlike: Unlike) -> bool:
        if all(one.ended == "finished" for one in self.states):
            return False
        if any(one.ended in {"failed", "killed"} for one in self.states):
            return True
        return any(not op.done and self.of[rank].still_s >= 0.25 for rank, op in unlike.ops.items()) or bool(
            waiting.stuck(self.waits, self.ended)
        )

    def _sites(self, apart: Apart) -> str:
        words = []
        for ranks in apart.sites:
            place = apart.ops[ranks[0]].user_site()
            if place is not None:
                words.append(f"{Path(place.file).name}:{place.line} on {_ranks(ranks)}")
        return ", ".join(words)

    # Where they parted

    def _part_ops(
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

    def _last_common(self, healthy: int, culprit: int) -> tuple[Frame, ...] | None:
        """The last collective of any group that both have called, in the healthy rank's order."""
        for key, op in reversed(self.of[healthy].order):
            twin = self.of[culprit].ops.get(key, {}).get(op.index)
            if twin is not None and site(twin.frames) == site(op.frames) and site(op.frames):
                return op.frames
        return None

    def _blame(self, sides: Sequence[Sequence[int]], parting: Parting | None) -> tuple[int, ...]:
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

    # Proof: one has ended

    def gone(self) -> Verdict | None:
        if not self.ended:
            return None
        victims = {one.rank for one in self.states if one.secondary}
        victims |= {rank for rank, wait in self.waits.items() if wait.needs & self.ended and wait.every}
        victims |= waiting.stuck(self.waits, self.ended)
        if not victims:
            return None
        worse = [rank for rank in sorted(self.ended) if self.of[rank].ended != "finished"]
        if worse:
            return self._dead(worse, victims)
        return self._left(sorted(self.ended), sorted(victims))

    def _dead(self, ranks: Sequence[int], victims: Iterable[int]) -> Verdict:
        state = self.of[ranks[0]]
        if (found := self._unequal_sizes(ranks, sorted(victims))) is not None:
            return found
        error = state.error
        frames = error.frames if error else state.stack
        frame = next((one for one in frames if one.user), None)
        left_at = None
        if frame is not None:
            why = f"{error.kind} was raised here" if error else "it stood here shortly before it was ended"
            left_at = LeftAt(
                frame.file, frame.line, own(frame.function), self.sources.line(frame.file, frame.line), why
            )  # fmt: skip
        code = state.view.process.exit_code
        how = f"failed with {error.kind}: {error.text}" if error else _signal_words(code)
        reason = f"{_ranks(ranks)} {how}, while {_ranks(sorted(victims))} wait for it"
        return Verdict("dead", True, tuple(ranks), left_at, reason=reason)

    def _unequal_sizes(self, ranks: Sequence[int], victims: Sequence[int]) -> Verdict | None:
        """A process that gets more bytes than it expects is ended by gloo; its last words say so."""
        told = [rank for rank in ranks if _LONGER.search(self.of[rank].view.process.last_words)]
        if not told:
            return None
        op = next((op for rank in victims if (op := self._last_op(rank)) is not None), None)
        frame = (op.user_site() if op else None) or self.of[told[0]].here()
        left_at = None
        if frame is not None:
            source = self.sources.line(frame.file, frame.line)
            left_at = LeftAt(frame.file, frame.line, own(frame.function), source, "the same call with unlike sizes")
        words = f" in {_op_words(op)}" if op else ""
        reason = f"{_ranks(told)} got more bytes from another rank than it expected{words}, and was ended by gloo"
        everyone = tuple(one.rank for one in self.states) if len(self.states) == 2 else tuple(told)
        return Verdict("mismatch", True, everyone, left_at, reason=reason)

    def _left(self, left: Sequence[int], victims: Sequence[int]) -> Verdict:
        """Ranks that came to the end of the program while others were in a collective."""
        key, apart = self._apart_before(left, victims)
        rank = next((one for one in victims if one in self.waits and self.waits[one].op), victims[0])
        wait = self.waits.get(rank)
        op = wait.op if wait and wait.op else self._last_op(rank)
        place = op.frames if op else self.of[rank].stack
        sides = sorted([list(left), list(victims)], key=lambda one: (-len(one), one))
        if apart is not None and key is not None:
            sides = apart.sites
            healthy, culprits = _sides(sides)
            parting = self._part_ops(key, apart.index, apart.ops, healthy, culprits)
        elif len(left) > len(victims):
            parting = self.locator.part(self._last_common(rank, left[0]), self._end(left[0]), place, left, victims)
        else:
            parting = self.locator.part(self._last_common(rank, left[0]), place, self._end(left[0]), victims, left)
        if apart is None and len(left) == len(victims) and not (parting and parting.leavers):
            ranks = tuple(left)
        else:
            ranks = self._blame(sides, parting)
        kind: Kind = "missing" if set(ranks) & set(left) else "extra"
        words = f"{op.kind} #{op.index}" if op else "an exchange"
        reason = f"{_ranks(left)} came to the end of the program while {_ranks(victims)} {_wait(victims)} in {words}"
        return self._made(kind, True, ranks, parting, reason, [])

    def _end(self, rank: int) -> tuple[Frame, ...]:
        """The stack at which a rank ended its program; empty where it came to its last line."""
        error = self.of[rank].error
        return error.frames if error is not None and error.kind.endswith("SystemExit") else ()

    def _last_op(self, rank: int) -> Op | None:
        order = self.of[rank].order
        open_ops = [op for _, op in order if not op.done]
        return open_ops[0] if open_ops else order[-1][1] if order else None

    def _apart_before(self, some: Iterable[int], others: Iterable[int]) -> tuple[Key | None, Apart | None]:
        """An earlier index that was called from unlike lines, by some here and others there."""
        for key in alignment.groups(self.states):
            apart = alignment.first_apart(self.states, key)
            if apart is not None and set(apart.ops) & set(some) and set(apart.ops) & set(others):
                return key, apart
        return None, None

    # Proof: a ring of waits

    def ring(self) -> Verdict | None:
        inside = waiting.stuck(self.waits, ())
        if not inside or not self._at_once(inside):
            return None
        proven = all(self.waits[rank].certain for rank in inside)
        if any(not self.waits[rank].every for rank in inside):
            proven = proven and min(waiting.stands_s(self.of[rank]) for rank in inside) >= 2.0
        parting, ranks = self._ring_parts(inside)
        storing = [rank for rank in sorted(inside) if self.waits[rank].via == "store"]
        if storing and len(storing) < len(inside):
            return self._at_store(storing, sorted(inside - set(storing)), proven=proven)
        words = "; ".join(
            f"rank {rank} waits in {self.waits[rank].what} for {_ranks(sorted(self.waits[rank].needs))}"
            for rank in sorted(inside)
        )
        return self._made("cycle", proven, ranks, parting, f"the ranks wait for one another: {words}", [])

    def _ring_parts(self, inside: set[int]) -> tuple[Parting | None, tuple[int, ...]]:
        """Where the ranks of a ring parted, and who is to blame."""
        key, apart = self._apart_before(inside, inside)
        if apart is not None and key is not None:
            healthy, culprits = _sides(apart.sites)
            parting = self._part_ops(key, apart.index, apart.ops, healthy, culprits)
            return parting, self._blame(apart.sites, parting)
        before, places = self._fork_of_orders(inside)
        by_site: dict[object, list[int]] = {}
        for rank in sorted(inside):
            by_site.setdefault(site(places[rank]), []).append(rank)
        sides = sorted(by_site.values(), key=lambda one: (-len(one), one))
        if len(sides) > 1:
            healthy, culprits = _sides(sides)
            parting = self.locator.part(before, places[healthy[0]], places[culprits[0]], healthy, culprits)
            return parting, self._blame(sides, parting)
        frames = places[sides[0][0]]
        return self.locator.part(None, frames, frames, sides[0][:1], sides[0][1:]), tuple(sorted(self._core(inside)))

    def _fork_of_orders(self, inside: set[int]) -> tuple[tuple[Frame, ...] | None, dict[int, tuple[Frame, ...]]]:
        """The longest common beginning of what the ranks called, whatever the groups: its last place, and the next.

        Where that does not single anybody out, the last collective in common, and where each rank stands.
        """
        orders = {rank: [op.frames for _, op in self.of[rank].order] for rank in inside}
        whole = all(self.of[rank].order and self.of[rank].order[0][1].index == 1 for rank in inside)
        if whole:
            for rank, wait in ((rank, self.waits[rank]) for rank in inside):
                if wait.op is None:
                    orders[rank].append(self.of[rank].stack)
            for at in range(min(len(one) for one in orders.values())):
                sites = Counter(site(one[at]) for one in orders.values())
                if len(sites) == 1:
                    continue
                counts = [count for _, count in sites.most_common(2)]
                if counts[0] > counts[1] and counts[0] + 1 >= len(inside):
                    before = next(iter(orders.values()))[at - 1] if at else None
                    return before, {rank: one[at] for rank, one in orders.items()}
                break
        standing = {rank: self._standing(rank) for rank in inside}
        sites = Counter(site(frames) for frames in standing.values())
        most = sites.most_common(1)[0][0]
        healthy = min(rank for rank in inside if site(standing[rank]) == most)
        others = [rank for rank in sorted(inside) if site(standing[rank]) != most]
        return (self._last_common(healthy, others[0]) if others else None), standing

    def _at_store(self, ranks: Sequence[int], waiters: Sequence[int], *, proven: bool) -> Verdict:
        """A rank waits for a key that only ranks that wait for it could set."""
        frame = self.of[ranks[0]].here()
        left_at = None
        if frame is not None:
            source = self.sources.line(frame.file, frame.line)
            left_at = LeftAt(
                frame.file, frame.line, own(frame.function), source, "it waits here for a key that nobody sets"
            )
        what = self.waits[ranks[0]].what
        reason = f"{_ranks(ranks)} {_wait(ranks)} in {what} for a key, and {_ranks(waiters)} {_wait(waiters)} for it"
        return Verdict("blocked", proven, tuple(ranks), left_at, reason=reason)

    def _core(self, inside: set[int]) -> set[int]:
        """The ring itself, without those that only wait for one of it."""
        core = set(inside)
        while True:
            needed = {need for rank in core for need in self.waits[rank].needs}
            if core <= needed:
                return core
            core &= needed

    def _at_once(self, ranks: Iterable[int]) -> bool:
        """Whether they stood at one common moment, by what is known of each."""
        spans = []
        for rank in ranks:
            state = self.of[rank]
            if waiting.stands_s(state) < 0.25:
                return False
            spans.append((-state.seen_s - state.still_s, -state.seen_s if state.view.silent_s <= 1.0 else 0.0))
        return max(begin for begin, _ in spans) <= min(end for _, end in spans) + 0.05

    def _standing(self, rank: int) -> tuple[Frame, ...]:
        """The stack of the collective that a rank waits in, else its present one."""
        wait = self.waits.get(rank)
        return wait.op.frames if wait and wait.op and wait.op.frames else self.of[rank].stack

    # Suspicion: one does not come

    def behind(self) -> Verdict | None:
        late = {need for wait in self.waits.values() for need in wait.needs if wait.every}
        late -= set(self.waits) | self.ended
        late = {rank for rank in late if self.of[rank].ended is None}
        if not late:
            return None
        states = [self.of[rank] for rank in sorted(late)]
        if any(waiting.is_busy(one) or waiting.stands_s(one) < _STILL_S for one in states):
            return None
        if any(waiting.is_stopped(one) or waiting.is_silent(one) for one in states):
            return self._blocked(states, sorted(rank for rank, wait in self.waits.items() if wait.needs & late))
        if any(one.here() is None for one in states):
            return None
        waiters = sorted(rank for rank, wait in self.waits.items() if wait.needs & late)
        goal = self._standing(waiters[0])
        ranks = [one.rank for one in states]
        if not all(self.locator.may_come(one.stack, goal) for one in states):
            return self._lost(ranks, waiters, goal)
        return self._blocked(states, waiters)

    def _lost(self, late: Sequence[int], waiters: Sequence[int], goal: Sequence[Frame]) -> Verdict:
        """They stand where no way leads to the collective that the others wait in."""
        key, apart = self._apart_before(late, waiters)
        sides = sorted([list(late), list(waiters)], key=lambda one: (-len(one), one))
        stack = self.of[late[0]].stack
        before = self._last_common(waiters[0], late[0])
        if apart is not None and key is not None:
            sides = apart.sites
            healthy, culprits = _sides(sides)
            parting = self._part_ops(key, apart.index, apart.ops, healthy, culprits)
        elif len(late) > len(waiters):
            parting = self.locator.part(before, stack, goal, late, waiters)
        else:
            parting = self.locator.part(before, goal, stack, waiters, late)
        ranks = self._blame(sides, parting) if len(late) != len(waiters) or apart or _shows(parting) else tuple(late)
        kind: Kind = "missing" if set(ranks) & set(late) else "extra"
        what = self.waits[waiters[0]].what
        reason = f"{_ranks(waiters)} {_wait(waiters)} in {what}, where {_ranks(late)} will not come any more"
        return self._made(kind, False, ranks, parting, reason, [])

    def _blocked(self, states: Sequence[State], waiters: Sequence[int]) -> Verdict | None:
        reasons = {}
        for one in states:
            word = waiting.halted_in(one) or waiting.blocked_in(one, self.sources)
            if word is None:
                return None
            reasons[one.rank] = word
        first = states[0]
        frame = first.here()
        left_at = None
        if frame is not None:
            source = self.sources.line(frame.file, frame.line)
            halted = waiting.halted_in(first)
            why = "it was last seen here" if halted else "it is blocked here; it has not left the common path"
            left_at = LeftAt(frame.file, frame.line, own(frame.function), source, why)
        ranks = tuple(one.rank for one in states)
        come = "does not come" if len(ranks) == 1 else "do not come"
        reason = f"{_ranks(ranks)} {come}: {reasons[first.rank]}; {_ranks(waiters)} {_wait(waiters)} for it"
        return Verdict("blocked", False, ranks, left_at, reason=reason)

    # Suspicion: they do not come together in the first place

    def joining(self) -> Verdict | None:
        """Ranks that stand where the world is made: who has another idea of it, or else all of them."""
        inside = [one for one in self.states if one.ended is None and waiting.is_joining(one)]
        if not inside or any(waiting.is_busy(one) or waiting.stands_s(one) < _STILL_S for one in inside):
            return None
        told = {one.rank: [waiting.argument(one, word) for word in ("group_rank", "group_size")] for one in inside}
        ranks = tuple(rank for rank, one in told.items() if None not in one and one != [rank, len(self.states)])
        if not ranks and len(inside) < len(self.states):
            return None
        ranks = ranks or tuple(told)
        frame = self.of[ranks[0]].here()
        left_at = None
        if frame is not None:
            source = self.sources.line(frame.file, frame.line)
            left_at = LeftAt(frame.file, frame.line, own(frame.function), source, "the ranks do not come together here")
        values = {rank: f"rank {one[0]} of {one[1]}" for rank, one in told.items() if None not in one}
        words = "; ".join(f"rank {rank} joins as {text}" for rank, text in values.items())
        reason = f"{_ranks(sorted(told))} {_wait(sorted(told))} for the others to join"
        reason += f": {words}" if words else ""
        return Verdict("blocked", False, ranks, left_at, values, reason=reason)

    # Suspicion: all are there, and nothing happens

    def roots(self) -> Verdict | None:
        """All ranks stand in the same collective, each with a root of its own."""
        if len(self.waits) < 2:
            return None
        found = {rank: self._root(rank) for rank in self.waits}
        known = {rank: root for rank, root in found.items() if root is not None}
        places = {site(self.of[rank].stack) for rank in known}
        if len(known) < 2 or len(places) != 1 or len({root for _, root in known.values()}) < 2:
            return None
        counts = Counter(root for _, root in known.values())
        most = counts.most_common(2)
        majority = most[0][0] if len(most) < 2 or most[0][1] > most[1][1] else None
        ranks = tuple(sorted(rank for rank, (_, root) in known.items() if root != majority))
        frame = self.of[ranks[0]].here()
        assert frame is not None
        values = {rank: f"{word} = {root}" for rank, (word, root) in known.items()}
        source = self.sources.line(frame.file, frame.line)
        left_at = LeftAt(frame.file, frame.line, own(frame.function), source, "each rank names another root")
        words = ", ".join(f"{root} on {_ranks([r for r, (_, x) in known.items() if x == root])}" for root in counts)
        reason = f"the ranks do not agree on the root: {words}"
        return Verdict("mismatch", False, ranks, left_at, values, reason=reason)

    def _root(self, rank: int) -> tuple[str, int] | None:
        state = self.of[rank]
        frame = state.here()
        stmt = self.sources.statement(frame.file, frame.line) if frame else None
        if frame is None or stmt is None or waiting.stands_s(state) < _STILL_S:
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
            root = evaluate(given[0], values, rank, len(self.states)) if given else UNKNOWN
            return (word, root) if isinstance(root, int) else None
        return None

    # Silent faults

    def silent(self) -> Verdict | None:
        for key in alignment.groups(self.states):
            apart = alignment.first_apart(self.states, key)
            if apart is None:
                continue
            healthy, culprits = _sides(apart.sites)
            parting = self._part_ops(key, apart.index, apart.ops, healthy, culprits)
            places = self._sites(apart)
            reason = f"the collective #{apart.index} of {self._group(key)} pairs calls from unlike lines: {places}"
            ranks = self._blame(apart.sites, parting)
            return self._made("mismatch", False, ranks, parting, reason, [], silent=True)
        return self._facts()

    def _facts(self) -> Verdict | None:
        for name in sorted({name for one in self.states for name in one.facts}):
            if facts.may_differ(name):
                continue
            have = {one.rank: one.facts[name] for one in self.states if name in one.facts}
            if len(have) < 2 or len(set(have.values())) < 2:
                continue
            counts = Counter(have.values()).most_common()
            clear = len(counts) < 2 or counts[0][1] > counts[1][1]
            ranks = tuple(sorted(rank for rank, value in have.items() if not clear or value != counts[0][0]))
            words = ", ".join(
                f"{value} on {_ranks([r for r, v in have.items() if v == value])}" for value, _ in counts
            )  # fmt: skip
            values = {rank: f"{name}: {value}" for rank, value in have.items()}
            return Verdict(
                "mismatch", False, ranks, None, values, reason=f"{name} differs: {words}", silent=True
            )  # fmt: skip
        return None

    # Words and places

    def _made(  # noqa: PLR0917
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
        left_at = parting.left_at if parting else None
        values = parting.values if parting else {}
        more = parting.evidence if parting else ("the line where they parted cannot be told",)
        return Verdict(kind, proven, ranks, left_at, values, (), reason, (*evidence, *more), silent)

    def _group(self, key: Key) -> str:
        return "all ranks" if len(key[1]) == len(self.states) else f"group {key[0]} ({_ranks(key[1])})"

    def places(self) -> tuple[Waiting, ...]:
        """Where each rank is."""
        return tuple(self._place(one) for one in self.states)

    def _place(self, one: State) -> Waiting:
        wait = self.waits.get(one.rank)
        op = wait.op if wait else None
        if op is None and one.ended != "finished":
            open_ops = [other for _, other in one.order if not other.done]
            op = open_ops[0] if open_ops and (one.secondary or one.ended or not one.stack) else None
        frame = (op.user_site() if op else None) or one.here()
        file, line = (frame.file, frame.line) if frame else ("", 0)
        source = self.sources.line(file, line) if frame else ""
        if op is None:
            name = wait.what if wait else ""
            return Waiting(one.rank, name, None, None, "", wait.via if wait else "", file, line, source)
        shape = op.sizes[0] if op.sizes else None
        dtype = op.dtypes[0] if op.dtypes else ""
        return Waiting(one.rank, op.kind, op.index, shape, dtype, op.group, file, line, source)

    def notes(self) -> list[str]:
        """Who works and who waits for it."""
        by_late: dict[int, list[Wait]] = {}
        for wait in self.waits.values():
            for need in wait.needs - set(self.waits) - self.ended:
                by_late.setdefault(need, []).append(wait)
        lines = []
        for rank, found in sorted(by_late.items()):
            since = max(waiting.stands_s(self.of[wait.rank]) for wait in found)
            frame = self.of[rank].here()
            at = f" at {Path(frame.file).name}:{frame.line}" if frame else ""
            does = "is stopped" if waiting.is_stopped(self.of[rank]) else "works"
            who = _ranks(sorted(wait.rank for wait in found))
            wait_word = "waits" if len(found) == 1 else "wait"
            lines.append(f"rank {rank} {does}{at}, {who} {wait_word} for it since {since:.0f} s")
        return lines


_LONGER = re.compile(r"preamble\.length <= op\.nbytes")


def _aborted(one: State) -> bool:
    """Whether it was ended by an abort(), as gloo does."""
    return one.ended == "killed" and one.view.process.exit_code in {134, -6}


def _shows(parting: Parting | None) -> bool:
    return parting is not None and bool(parting.leavers)


def _sides(sides: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
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


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _op_words(op: Op) -> str:
    shape = f" [{', '.join(str(one) for one in op.sizes[0])}]" if op.sizes else ""
    dtype = f" {op.dtypes[0]}" if op.dtypes else ""
    root = f" of rank {op.root}" if op.root is not None else ""
    place = op.user_site()
    at = f" ({Path(place.file).name}:{place.line})" if place else ""
    return f"{op.kind}{shape}{dtype}{root}{at}"


def _signal_words(code: int | None) -> str:
    if code is None:
        return "has gone"
    if code >= 128 or code < 0:
        number = code - 128 if code >= 128 else -code
        return f"was ended by signal {number}"
    return f"ended with exit code {code}"
