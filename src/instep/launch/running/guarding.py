"""The guard of one run: its folder in memory, what it says on the screen, and what it leaves in the run folder."""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.guard import report, stacks, storage
from instep.guard.folders import make_folder
from instep.guard.nodes import ask_stacks, take_stacks
from instep.guard.watch import LOOK_S, Found, Watch
from instep.launch.running.failure import may_follow
from instep.launch.running.telling import near
from instep.runs import EXIT_OUT_OF_STEP
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from instep.guard.nodes import Remote
    from instep.launch.planning.plan import Plan
    from instep.launch.running.failure import Event
    from instep.launch.running.output import Output
    from instep.launch.running.telling import Teller

_SILENT_S = 1.5  # signs of life come four times a second
_WORDS = 200  # lines at the end of a rank's log: what gloo says stands above the stacks of all threads


class Guarding:
    """Watches the ranks of a run, and tells what it finds.

    Attributes:
        folder: where the ranks write their records.
        kills: whether a verdict ends the job.

    """

    def __init__(
        self, plan: Plan, run: Path, output: Output, teller: Teller, nodes: Sequence[Remote] | None = None
    ) -> None:
        """Begin; the ranks are not there yet.

        Args:
            plan: what is done.
            run: the run folder.
            output: of the ranks.
            teller: makes the lines that are said.
            nodes: where agents see the ranks for us; None: they are children of this process.

        Raises:
            OSError: no folder can be made.

        """
        self.folder, self._lock = make_folder()
        self.kills = plan.guard == "kill"
        self._run = run
        self._output = output
        self._teller = teller
        self._broken = self._has_ended = False
        self._said: list[dict[str, Any]] = []
        self._nodes = nodes or ()
        self._is_here = nodes is None
        for node in self._nodes:
            node.last_words = self._last_words
        self._watch = Watch(
            self.folder,
            plan.world_size,
            plan.host,
            suspect_s=plan.suspect_s,
            last_words=self._last_words,
            ranks=None if self._is_here else (),
            nodes=self._nodes,
        )

    def _last_words(self, rank: int) -> str:
        return "\n".join(self._output.logs[rank].tail(_WORDS))

    def _own(self, pids: Mapping[int, int]) -> Mapping[int, int]:
        """Those that mean something on this machine."""
        return pids if self._is_here else {}

    def _is_blind(self) -> bool:
        """Whether a machine does not tell what it sees: then nobody can say who waits for whom, and it may be lost."""
        for node in self._nodes:
            node.pump()
        latest = time.monotonic() - _SILENT_S
        return any(not node.has_ended and (node.link is None or node.told_at < latest) for node in self._nodes)

    @property
    def next_at(self) -> float:
        """When to look again, by the monotonic clock."""
        return self._watch.next_at

    def look(self, pids: Mapping[int, int], exit_codes: Mapping[int, int]) -> Found | None:
        """Look at the ranks; a verdict that ends the job, or None. All else is told here."""
        if time.monotonic() >= self.next_at and self._is_blind():
            self._watch.next_at = time.monotonic() + LOOK_S
            return None
        found = self._safely(partial(self._watch.look, self._own(pids), exit_codes))
        notes = self._watch.take_notes()
        if notes:
            self._output.say([self._teller.note(line) for line in notes])
        return self._weighed(found, pids) if found else None

    def explain(self, event: Event, pids: Mapping[int, int], exit_codes: Mapping[int, int]) -> Found | None:
        """Before a rank is blamed for its failure: whether that follows from ranks that are out of step."""
        if not may_follow(event) or self._is_blind():
            return None
        found = self._safely(partial(self._watch.final, self._own(pids), exit_codes))
        if found is None or not found.verdict.proven or _is_own_failure(found):
            return None
        return self._weighed(found, pids)

    def rank_ended(self, rank: int) -> None:
        """A signal has ended a rank: the stacks that its interpreter wrote at that moment belong into its log."""
        text = storage.read_fatal(self.folder, rank)
        if text:
            self._output.drain()
            self._output.logs[rank].write(text.encode())
            if self._output.shows(rank) and not self._has_ended:
                self._output.stderr.write(text.encode())

    def last_look(self, exit_codes: Mapping[int, int]) -> None:
        """All ranks have ended well: what their last records say of faults in silence."""
        found = self._safely(partial(self._watch.final, {}, exit_codes, wait_s=0))
        if found and found.verdict.silent:
            self._tell(found, {})

    def _safely(self, look: Callable[[], Found | None]) -> Found | None:
        """Whatever ails the guard, the job goes on; it is said once, with all that is needed to mend it."""
        if self._broken:
            return None
        try:
            return look()
        except Exception:  # noqa: BLE001
            self._broken = True
            with suppress(OSError):
                (self._run / "guard-error.txt").write_text(traceback.format_exc())
            line = (
                f"the ranks are not watched any more: an error in the guard, see {near(self._run / 'guard-error.txt')}"
            )
            self._output.say([self._teller.note(line)])
            return None

    @property
    def is_watching(self) -> bool:
        """Whether there is more to look at."""
        return not self._broken

    def _weighed(self, found: Found, pids: Mapping[int, int]) -> Found | None:
        if self.kills and not found.verdict.silent:
            return found
        self._tell(found, pids)
        return None

    def end(self, found: Found, pids: Mapping[int, int]) -> None:
        """Tell the verdict that ends the job, before anybody is ended."""
        self._has_ended = True
        self._tell(found, pids, ends=True)

    def _tell(self, found: Found, pids: Mapping[int, int], *, ends: bool = False) -> None:
        """Onto the screen, once, and into the run folder."""
        said = found.as_json()
        key = (said["kind"], said["ranks"], said["left_at"], said["silent"])
        if any(key == (one["kind"], one["ranks"], one["left_at"], one["silent"]) for one in self._said):
            return
        # What ends the job is the object itself; what was found besides stands in it.
        self._said.insert(0 if not found.verdict.silent else len(self._said), said)
        end = f"see it again: instep why {near(self._run)}"
        if not found.verdict.silent:
            with suppress(OSError):
                stacks.write(self._run / "stacks", found.views, self._stacks(found, pids))
            done = f"job ended (exit code {EXIT_OUT_OF_STEP})" if ends else "the job goes on (--guard warn)"
            end = f"{done}. Stacks of all ranks: {near(self._run / 'stacks')}   ·   again: instep why {near(self._run)}"
        first, *others = self._said
        with suppress(OSError):  # a full disk does not make the ranks be in step
            whole = {**first, "others": others} if others else first
            write_whole(self._run / "desync.json", json.dumps(whole, indent=2).encode() + b"\n")
        lines = report.text(found.verdict, found.after_s, end=end).splitlines()
        self._output.say(self._teller.verdict(lines, silent=found.verdict.silent))

    def _stacks(self, found: Found, pids: Mapping[int, int]) -> dict[int, str]:
        ask_stacks(self._nodes)
        return stacks.collect(self.folder, self._own(pids), found.views) | take_stacks(self._nodes)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _is_own_failure(found: Found) -> bool:
    """Whether all that is said is that a rank has failed, which is no falling out of step."""
    codes = [view.process.exit_code for view in found.views if view.rank in found.verdict.ranks]
    return found.verdict.kind == "dead" and 0 not in codes
