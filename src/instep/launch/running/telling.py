"""instep's own lines about a run: made for reading, with colour on a terminal."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from instep.launch.running.failure import headline
from instep.runs import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from instep.launch.planning.plan import Plan
    from instep.launch.running.failure import Event

_RED, _GREEN, _YELLOW, _DIM = "31", "32", "33", "2"
_ENDINGS = {
    Outcome.FINISHED: ("✓", _GREEN),
    Outcome.FAILED: ("✗", _RED),
    Outcome.OUT_OF_STEP: ("✗", _RED),
    Outcome.PREEMPTED: ("↻", _YELLOW),
    Outcome.INTERRUPTED: ("■", _YELLOW),
}
LOG_LINES = 20  # of a log that is shown after a failure


class Teller:
    """Makes the lines.

    Args:
        colour: whether the reader is a terminal that wants it.

    """

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def start(self, plan: Plan, port: int, folder: Path) -> list[str]:
        """What is being started, and how the cores were divided."""
        where = plan.host if len(plan.nodes) == 1 else f"{len(plan.nodes)} machines"
        ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} on {where}"
        threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''} each ({plan.nodes[0].threads_why})"
        facts = f"{ranks} · {'CPU' if plan.device == 'cpu' else 'GPU'} · {threads} · port {port} · {near(folder)}"
        lines = [self._paint(f"instep: {facts}", _DIM)]
        if plan.why:
            lines.append(self._paint(f"  {plan.why}", _DIM))
        return lines

    def failure(self, event: Event, host: str, *, detail: list[str], log: Path, others: int, memory: str) -> list[str]:
        """The culprit, once, and what is done about it."""
        lines = [self._paint(f"✗ {headline(event, host, memory=memory)}", _RED)]
        lines += [f"  {line}" for line in detail]
        lines.append(f"  its output: {near(log)}")
        if others:
            lines.append(f"  ending the other {f'{others} ranks' if others > 1 else 'rank'}")
        return lines

    def lost(self, why: str, *, others: int) -> list[str]:
        """A machine is out of reach, or what stood between us and its ranks has gone."""
        lines = [self._paint(f"✗ {why}", _RED)]
        if others:
            lines.append(f"  ending the other {f'{others} ranks' if others > 1 else 'rank'}")
        return lines

    def again(self, which: str, pause_s: float, lost: Sequence[str]) -> list[str]:
        """All ranks will be started once more."""
        where = f"; looking for {', '.join(lost)}" if lost else ""
        return [self._paint(f"↻ restart {which} in {pause_s:g} s{where}", _YELLOW)]

    def verdict(self, lines: list[str], *, silent: bool) -> list[str]:
        """The guard's report."""
        return [self._paint(lines[0], _YELLOW if silent else _RED), *lines[1:]]

    def note(self, line: str) -> str:
        """Something that may go on."""
        return self._paint(f"… {line}", _DIM)

    def asked(self, number: int, world_size: int, grace: float, *, again: bool, started: bool) -> list[str]:
        """A signal has come."""
        name = signal.Signals(number).name
        if again:
            return [self._paint(f"■ {name} again: killing all ranks", _YELLOW)]
        if not started:
            return [self._paint(f"■ {name}", _YELLOW)]
        whom = f"the {world_size} ranks" if world_size > 1 else "the rank"
        again_text = "Ctrl-C" if number == signal.SIGINT else name
        return [
            self._paint(f"■ {name}: passed on to {whom}, killed in {grace:g} s (once more {again_text}: now)", _YELLOW)
        ]

    def leftovers(self, names: list[str]) -> list[str]:
        """Processes that outlived their rank."""
        if not names:
            return []
        count = f"{len(names)} processes" if len(names) > 1 else "one process"
        return [self._paint(f"  ended {count} that the ranks left behind: {', '.join(names[:5])}", _DIM)]

    def end(self, outcome: Outcome, code: int, seconds: float, folder: Path) -> list[str]:
        """The last line."""
        mark, colour = _ENDINGS[outcome]
        more = f" · exit code {code}" if code else ""
        hint = "; saved: start it again" if outcome is Outcome.PREEMPTED else ""
        return [f"{self._paint(f'{mark} {outcome.value}', colour)}{hint} · {seconds:.1f} s{more} · {near(folder)}"]


def near(path: Path) -> str:
    """The path relative to the working folder where it lies below, else whole."""
    whole = os.path.abspath(path)  # noqa: PTH100  # resolve() would follow the user's symbolic links
    short = os.path.relpath(whole)
    return whole if short.startswith("..") else short


def wants_colour(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to colour: a terminal, and nobody has said no (no-color.org)."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
