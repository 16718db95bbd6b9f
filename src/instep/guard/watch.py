"""The watch: outside the ranks, so that it works where one is frozen, and costs them nothing while all move.

It reads the ranks' signs of life, a few times a second. Where one stands still it asks all for snapshots and puts them
before :func:`instep.guard.verdict.judge`. What is proven counts when it is found a second time; what is only suspected,
when it has stood long enough.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from instep.guard import aborted, storage
from instep.guard.positions import Places
from instep.guard.processes import Processes, catches, is_stopped
from instep.guard.records import Beat, Frame, Snapshot, View
from instep.guard.report import as_json, near, rank_words
from instep.guard.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from instep.guard.verdicts import Verdict

LOOK_S = 0.25  # between two looks at the signs of life
_SOON_S = 0.05  # between two looks while snapshots are on their way
_ANSWER_S = 0.8  # a rank that has not answered by then does not
_STILL_S = 0.5  # a rank that stands longer is looked at
_LONG_STILL_S = 2.0  # also where its neighbours seem to be where it is
_AGAIN_S = 0.22  # between a proof and its confirmation: two snapshots of a race differ
_SUSPECT_EVERY_S = 1.0  # a suspicion is judged anew
_LONGEST_PAUSE_S = 2.0  # between two judgements of ranks that stand where nothing is wrong
_MUTE_S = 1.0  # a rank without a sign of life for longer: it holds the interpreter's lock, or was stopped
_STOPPED_S = 12.0  # a debugger may stop a rank for ten seconds
_ASLEEP_S = 1.5  # the watch itself was not running: what it knows is old
_ROUTINE_S = (2.0, 10.0)  # after the first sign of life: all are judged where nobody stands, for faults in silence
_ROUTINE_EVERY_S = 60.0
_TOLD_S = 10.0  # before ranks that are known to be out of step are judged again
_TOLD_AT_S = (20.0, 60.0)  # of waiting for a rank that works; then every three minutes
_TELL_EVERY_S = 180.0
_WAITING_IN = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/", "/instep/comm/")


@dataclass(frozen=True)
class Found:
    """A verdict that stands.

    Attributes:
        verdict: what was found.
        views: of all ranks, on which it rests.
        after_s: seconds since the ranks parted, None where that is not known.

    """

    verdict: Verdict
    views: tuple[View, ...]
    after_s: float | None

    def as_json(self) -> dict[str, Any]:
        """The object of ``desync.json``."""
        return as_json(self.verdict, self.after_s)


class Node(Protocol):
    """Ranks of another machine, as somebody there sees them.

    Attributes:
        ranks: of the world.
        beats: their last signs of life, with times of this machine's clock.
        has_answered: whether the last call of :meth:`ask` was answered, or cannot be any more.

    """

    ranks: tuple[int, ...]
    beats: dict[int, Beat]

    @property
    def has_answered(self) -> bool: ...  # noqa: D102

    def ask(self) -> None:
        """Have all ranks asked for snapshots."""

    def pump(self) -> None:
        """Take what has come."""

    def views(self, exit_codes: Mapping[int, int | None]) -> tuple[View, ...]:
        """What is known of each rank now."""


class Watch:
    """Watches the ranks of one machine, and with the help of others those of more.

    Args:
        folder: where their recorders write.
        world_size: number of ranks.
        host: the machine's name.
        suspect_s: how long a suspicion must stand.
        last_words: the end of what a rank has written.
        decide: the verdict over all views, for tests.
        ranks: those of this machine; None: all.
        nodes: the other machines.

    Attributes:
        next_at: when to look again, by the monotonic clock.

    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        host: str,
        *,
        suspect_s: float,
        last_words: Callable[[int], str] = lambda _: "",
        decide: Callable[[Sequence[View]], Verdict | None] | None = None,
        ranks: Sequence[int] | None = None,
        nodes: Sequence[Node] = (),
    ) -> None:
        self.next_at = 0.0
        self._folder = folder
        self._world_size = world_size
        self._ranks = range(world_size) if ranks is None else ranks
        self._nodes = nodes
        self._host = host
        self._suspect_s = suspect_s
        self._judge = decide or _decide
        self._processes = Processes(last_words)
        self._places = Places()
        self._beats: dict[int, Beat] = {}
        self._snapshots: dict[int, tuple[tuple[int, int], Snapshot | None]] = {}
        self._looked_at = 0.0
        self._began_at: float | None = None
        self._routines = 0
        self._progress: dict[int, tuple[tuple[int, ...], float]] = {}  # what a rank had asked for, and since when
        self._asked_at: float | None = None
        self._ask_after = 0.0
        self._pause = _STILL_S
        self._situation: object = None
        self._candidate: object = None
        self._candidate_since = 0.0
        self._innocent_at = 0.0
        self._silent: set[object] = set()
        self._told = 0
        self._notes: list[str] = []
        self._mute: set[int] = set()  # ranks without signs of life, whose interpreter was asked for its stack

    def look(self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None]) -> Found | None:
        """Look, if it is time; a verdict that stands, or None.

        Args:
            pids: of all ranks that were started.
            exit_codes: of those that have ended, 128 + N for signal N; None where the code is not known.

        """
        now = time.monotonic()
        if now < self.next_at:
            return None
        self.next_at = now + LOOK_S
        slept = now - self._looked_at > _ASLEEP_S
        self._looked_at = now
        self.read_beats(pids, exit_codes)
        if slept:
            self._asked_at, self._candidate, self._innocent_at = None, None, now
            self._ask_after = now + LOOK_S
            return None
        if not self._beats:
            return None
        if self._asked_at is not None:
            return self._collect(pids, exit_codes, now)
        if now >= self._ask_after and self._has_reason(exit_codes, now):
            self.ask(pids, exit_codes)
        self._note_waiting(exit_codes, now)
        return None

    def take_notes(self) -> list[str]:
        """Lines for the screen since the last call: who works, and who waits for it."""
        notes, self._notes = self._notes, []
        return notes

    def final(
        self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None], *, wait_s: float = 0.5
    ) -> Found | None:
        """A rank has ended: ask those that are left for a last word, and judge now."""
        now = time.monotonic()
        self.ask(pids, exit_codes)
        while True:
            self.read_beats(pids, exit_codes)
            if self.have_answered(exit_codes, now) or time.monotonic() > now + wait_s:
                break
            time.sleep(0.02)
        self._asked_at = None
        if not self._beats:
            return None
        return self._judged(self.views(pids, exit_codes))[1]

    def views(self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None]) -> tuple[View, ...]:
        """What is known of each rank now."""
        now = time.monotonic()
        snapshots = {rank: self._snapshot(rank) for rank in self._ranks}
        found = []
        for rank in self._ranks:
            beat, snapshot = self._beats.get(rank), snapshots[rank]
            if snapshot:
                snapshot = replace(snapshot, beat=self._with_groups(snapshot.beat, snapshot))
            if beat:
                beat = self._with_groups(beat, snapshot)
            process = self._processes.view(rank, pids.get(rank), exit_codes.get(rank))
            if beat and (exit_codes.get(rank) or 0) > 128:
                beat = self._last_place(beat, storage.fatal_path(self._folder, rank))
            elif beat and rank in self._mute and now - beat.time_s > _MUTE_S:
                beat = self._last_place(beat, storage.stacks_path(self._folder, rank))
            age = max(0.0, now - snapshot.beat.time_s) if snapshot else 0.0
            silent = max(0.0, now - beat.time_s) if beat else 0.0
            found.append(View(rank, self._host, process, snapshot, age, beat, silent))
        for view in (view for node in self._nodes for view in node.views(exit_codes)):
            snapshot, beat = view.snapshot, view.beat
            if snapshot:
                snapshot = replace(snapshot, beat=self._with_groups(snapshot.beat, snapshot))
            if beat:
                beat = self._with_groups(beat, snapshot)
            found.append(replace(view, snapshot=snapshot, beat=beat))
        return tuple(sorted(found, key=lambda view: view.rank))

    def _with_groups(self, beat: Beat, snapshot: Snapshot | None) -> Beat:
        """With the groups of its operations that came and went between two beats: other ranks know them, too."""
        last = {op.group: op.index for op in snapshot.ops} if snapshot else {}
        for group in beat.groups:
            last.pop(group.name, None)
        if not last:
            return beat
        told = [*self._beats.values(), *(one.beat for _, one in self._snapshots.values() if one is not None)]
        known = {one.name: one for other in told for one in other.groups if beat.rank in one.members}
        found = [replace(known[name], asked=index) for name, index in last.items() if name in known]
        return replace(beat, groups=(*beat.groups, *found))

    def _last_place(self, beat: Beat, file: Path) -> Beat:
        """The last sign of life of a rank, with the stack that its interpreter wrote when a signal came after that."""
        stack = storage.main_stack(file)
        if not stack:
            return beat
        frames = [(*self._places.of_file(file), line, function) for file, line, function in stack]
        written = tuple(Frame(file, line, function, user) for file, user, line, function in frames)
        return replace(beat, stack=written, count=beat.count + 1)

    # What is read

    def read_beats(self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None]) -> dict[int, Beat]:
        """The last sign of life of each rank that has given one."""
        now = time.monotonic()
        read = {rank: storage.read_beat(self._folder, rank) for rank in self._ranks}
        for node in self._nodes:
            node.pump()
            read |= {rank: node.beats.get(rank) for rank in node.ranks}
        for rank, beat in read.items():
            if beat is None:
                self._beats.pop(rank, None)  # somebody has cleaned up: an old beat would be that of a rank that stands
                continue
            self._beats[rank] = beat
            asked = tuple(group.asked for group in beat.groups)
            if rank not in self._progress or self._progress[rank][0] != asked:
                self._progress[rank] = (asked, now)
            if rank in pids and rank not in exit_codes:
                self._processes.sample(rank, pids[rank])
        if self._beats and self._began_at is None:
            self._began_at = now
        return self._beats

    def _snapshot(self, rank: int) -> Snapshot | None:
        """The last one, read anew where there is another."""
        try:
            stat = storage.snapshot_path(self._folder, rank).stat()
        except OSError:
            return None
        key = (stat.st_ino, stat.st_mtime_ns)
        if self._snapshots.get(rank, (None, None))[0] != key:
            self._snapshots[rank] = (key, storage.read_snapshot(self._folder, rank))
        return self._snapshots[rank][1]

    def _stands_since(self, rank: int) -> float:
        beat = self._beats[rank]
        return beat.time_s - beat.still_s

    # When to ask

    def _has_reason(self, exit_codes: Mapping[int, int | None], now: float) -> bool:
        alive = [rank for rank in self._beats if rank not in exit_codes and self._beats[rank].ended is None]
        still = {rank: now - self._stands_since(rank) for rank in alive if now - self._stands_since(rank) >= _STILL_S}
        if not still:
            self._candidate, self._situation, self._pause, self._told = None, None, _STILL_S, 0
            self._innocent_at = now
            return self._is_routine(now)
        if self._candidate is not None:
            return True
        apart = len(alive) < self._world_size or len(still) == len(alive) or self._counts_differ()
        if not apart and max(still.values()) < _LONG_STILL_S:
            return False
        situation = (tuple(still), tuple(sorted((rank, self._progress[rank][0]) for rank in alive)), len(exit_codes))
        if situation != self._situation:
            self._situation, self._pause = situation, _STILL_S
        return True

    def _is_routine(self, now: float) -> bool:
        """Whether it is time for a look at the records of ranks that all move."""
        done = self._routines
        at = _ROUTINE_S[done] if done < len(_ROUTINE_S) else _ROUTINE_EVERY_S * (done - len(_ROUTINE_S) + 1)
        if self._began_at is None or now < self._began_at + at:
            return False
        self._routines += 1
        return True

    def _counts_differ(self) -> bool:
        asked: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for beat in self._beats.values():
            for group in beat.groups:
                asked.setdefault((group.name, group.members), set()).add(group.asked)
        return any(len(counts) > 1 for counts in asked.values())

    def ask(self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None]) -> None:
        """Ask all ranks for snapshots."""
        now = time.monotonic()
        storage.ask(self._folder)
        for node in self._nodes:
            node.ask()
        self._asked_at = now
        self.next_at = now + _SOON_S
        self._mute &= {rank for rank, beat in self._beats.items() if now - beat.time_s > _MUTE_S}
        for rank, beat in self._beats.items():
            if rank in pids and rank not in exit_codes and now - beat.time_s > _MUTE_S and beat.ended is None:
                self._ask_interpreter(rank, pids[rank])

    def _ask_interpreter(self, rank: int, pid: int) -> None:
        """Have a rank that gives no more signs write its stack once: no thread of Python is needed for that."""
        if rank in self._mute or is_stopped(pid) or not catches(pid, storage.STACKS_SIGNAL):
            return
        self._mute.add(rank)
        storage.clear_stacks(self._folder, rank)
        with suppress(OSError):
            os.kill(pid, storage.STACKS_SIGNAL)

    def have_answered(self, exit_codes: Mapping[int, int | None], asked_at: float) -> bool:
        """Whether all that can answer have done so; one that has given no sign for a second cannot."""
        if not all(node.has_answered for node in self._nodes):
            return False
        for rank in self._ranks:
            beat = self._beats.get(rank)
            if beat is None or rank in exit_codes or beat.ended is not None or asked_at - beat.time_s > 1.0:
                continue
            snapshot = self._snapshot(rank)
            if snapshot is None or snapshot.beat.time_s < asked_at:
                return False
        return True

    # What is made of the answers

    def _collect(self, pids: Mapping[int, int], exit_codes: Mapping[int, int | None], now: float) -> Found | None:
        """Judge, once the answers are there."""
        assert self._asked_at is not None
        if now < self._asked_at + _ANSWER_S and not self.have_answered(exit_codes, self._asked_at):
            self.next_at = now + _SOON_S
            return None
        self._asked_at = None
        verdict, found = self._judged(self.views(pids, exit_codes))
        if verdict is None or found is None:
            self._candidate, self._innocent_at = None, now
            self._rest(now)
            return None
        if not verdict.silent:
            return found if self._stands(verdict, found, now) else None
        self._rest(now)
        new = _key(verdict) not in self._silent
        self._silent.add(_key(verdict))
        return found if new else None

    def _stands(self, verdict: Verdict, found: Found, now: float) -> bool:
        """Whether the same was found before: a proof once, a suspicion for long enough."""
        if _key(verdict) != self._candidate:
            self._candidate = _key(verdict)
            self._candidate_since = self._suspected_since(verdict, now)
            self._ask_after = self.next_at = now + _AGAIN_S
            return False
        due = self._candidate_since + self._patience(found.views)
        if verdict.proven or now >= due:
            self._ask_after = now + _TOLD_S  # whoever is told may let the job go on
            return True
        self._ask_after = min(now + _SUSPECT_EVERY_S, due)
        return False

    def _judged(self, views: tuple[View, ...]) -> tuple[Verdict | None, Found | None]:
        verdict = aborted.explained(self._judge(aborted.completed(views)), views)
        return verdict, None if verdict is None else Found(verdict, views, since(verdict, views))

    def _rest(self, now: float) -> None:
        self._ask_after = now + self._pause
        self._pause = min(_LONGEST_PAUSE_S, self._pause * 2)

    def _suspected_since(self, verdict: Verdict, now: float) -> float:
        """From when on a suspicion stands: nobody has moved since, and nobody was found at work."""
        marks = [time for _, time in self._progress.values()]
        for rank in verdict.ranks:
            beat = self._beats.get(rank)
            marks.append(beat.time_s - beat.still_s if beat else now)
        return min(now, max([*marks, self._innocent_at]))

    def _patience(self, views: Sequence[View]) -> float:
        stopped = any(view.process.state in {"T", "t"} for view in views)
        return max(self._suspect_s, _STOPPED_S) if stopped else self._suspect_s

    def _note_waiting(self, exit_codes: Mapping[int, int | None], now: float) -> None:
        """Say who works while others have waited for it for long; the job goes on."""
        limits = (*_TOLD_AT_S, _TOLD_AT_S[-1] + _TELL_EVERY_S * max(1, self._told - len(_TOLD_AT_S) + 1))
        limit = limits[min(self._told, len(_TOLD_AT_S))]
        alive = [rank for rank in self._beats if rank not in exit_codes]
        stands = {rank: now - self._stands_since(rank) for rank in alive if _waits_for_others(self._beats[rank])}
        if not stands or max(stands.values()) < limit:
            return
        waiting = [rank for rank, seconds in stands.items() if seconds >= limit / 2]
        working = [rank for rank in alive if rank not in waiting]
        if working and self._candidate is None:
            self._told += 1
            self._notes.append(_waiting_words(waiting, working, self._beats, max(stands.values())))


def _decide(views: Sequence[View]) -> Verdict | None:
    """The verdict; without the line where the program's text is such that our reading of it fails."""
    try:
        return judge(views)
    except Exception:  # noqa: BLE001  # any source file may come by: it shall not cost the verdict
        return judge(views, lambda _: None)


def _key(verdict: Verdict) -> tuple[object, ...]:
    place = verdict.left_at
    return (verdict.kind, verdict.ranks, verdict.proven, place and (place.file, place.line))


def _waits_for_others(beat: Beat) -> bool:
    """Whether the main thread stands inside a library's exchange between ranks."""
    for frame in beat.stack:
        if frame.user:
            return False
        if any(part in frame.file for part in _WAITING_IN):
            return True
    return False


def _waiting_words(waiting: Sequence[int], working: Sequence[int], beats: Mapping[int, Beat], seconds: float) -> str:
    frame = next((one for one in beats[working[0]].stack if one.user), None)
    place = f" ({near(frame.file)}:{frame.line} {frame.function}())".replace("<module>()", "") if frame else ""
    waits, works = ("wait" if len(waiting) > 1 else "waits"), ("work" if len(working) > 1 else "works")
    whom = "them" if len(working) > 1 else "it"
    return (
        f"{rank_words(working)} {works}{place.replace(' )', ')')}, "
        f"{rank_words(waiting)} {waits} for {whom} since {seconds:.0f} s"
    )


def since(verdict: Verdict, views: Sequence[View]) -> float | None:
    """Seconds since the ranks parted: since the first of them began to wait in the operation that is not matched."""
    ops = {view.rank: view.snapshot.ops for view in views if view.snapshot}
    times = [
        op.time_ns
        for place in verdict.waiting
        for op in ops.get(place.rank, ())
        if place.op and op.time_ns and (op.group, op.index, op.kind) == (place.group, place.index, place.op)
    ]
    if times:
        return max(0.0, (time.time_ns() - min(times)) / 1e9)
    beats = {view.rank: view.beat for view in views if view.beat}
    stands = [beats[place.rank].time_s - beats[place.rank].still_s for place in verdict.waiting if place.rank in beats]
    return max(0.0, time.monotonic() - min(stands)) if stands else None
