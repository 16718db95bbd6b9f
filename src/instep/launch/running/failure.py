"""Which rank failed first, and how to say it. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from instep.runs import EXIT_PREEMPTED, exit_code_of

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 0.3  # seconds: the peers of a killed rank say so some milliseconds before its own end is known
LONG_WINDOW = 1.5  # where all that is known is that peers were lost: the kernel may still be freeing a big process
_LONGEST = 300  # characters of a message in the headline

_PEER_TEXT = re.compile(
    r"connection (was )?(likely )?(reset|closed|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote process exited|ncclRemoteError|communicator was aborted|got 0 bytes|socket (was )?closed"
    r"|sendBytes failed",
    re.IGNORECASE,
)
# What torch and gloo say where another rank does not come, or comes with something else.
_DISAGREE_TEXT = re.compile(
    r"timed out|timeout|enforce fail|EnforceNotMet|preamble\.length|mismatch between collectives", re.IGNORECASE
)
_PEER_TYPES = re.compile(r"RuntimeError$|ConnectionError$|^torch\.|^instep\.errors\.(StepError|JoinError)$")


@dataclass(frozen=True)
class Event:
    """One sign that a rank fails: an exception escaped, or the process ended badly.

    Attributes:
        rank: which.
        time: when, CLOCK_MONOTONIC.
        exit_code: what the rank ends with; 128 + N for signal N.
        signal: that ended it, 0 for none.
        type: of the exception, with its module; empty where none is known.
        message: of the exception.
        traceback: as python prints it, the user's frames only.

    """

    rank: int
    time: float
    exit_code: int
    signal: int = 0
    type: str = ""
    message: str = ""
    traceback: str = ""

    @property
    def is_peer_loss(self) -> bool:
        """Whether this only says that another rank has gone."""
        if self.type.startswith("instep."):
            return bool(_PEER_TYPES.search(self.type))
        return bool(self.type and _PEER_TYPES.search(self.type) and _PEER_TEXT.search(self.message))

    def as_json(self, host: str) -> dict[str, Any]:
        """For ``run.json``."""
        return {"host": host, **asdict(self)}


def may_follow(event: Event) -> bool:
    """Whether it may be the consequence of ranks that are out of step: a lost peer, a timeout, gloo's abort."""
    of_torch = bool(event.type and _PEER_TYPES.search(event.type) and _DISAGREE_TEXT.search(event.message))
    return event.is_peer_loss or of_torch or event.signal == signal.SIGABRT


def event_of_report(report: dict[str, Any]) -> Event:
    """From what a rank reports of an exception."""
    return Event(**report)


def event_of_end(rank: int, status: int, time: float) -> Event | None:
    """From the status of an ended process, -N for signal N; None where it ended well."""
    if status in {0, EXIT_PREEMPTED}:
        return None
    return Event(rank, time, exit_code_of(status), signal=max(0, -status))


def first_failure(events: Sequence[Event]) -> Event:
    """The event that names the culprit.

    Of each rank the first event counts, since its later ones follow from it. What happened to a rank itself goes
    before the complaints that a peer was lost; then the earlier goes first.
    """
    firsts: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event.time):
        firsts.setdefault(event.rank, event)
    return min(firsts.values(), key=lambda event: (event.is_peer_loss, event.time))


def decide_at(events: Sequence[Event]) -> float:
    """When enough is known to name the culprit."""
    begin = min(event.time for event in events)
    return begin + (LONG_WINDOW if first_failure(events).is_peer_loss else WINDOW)


def headline(event: Event, host: str, *, memory: str = "") -> str:
    """One line: which rank, where, what.

    Args:
        event: the first failure.
        host: its machine.
        memory: what is known of the out-of-memory killer, where a SIGKILL is to be explained.

    """
    return f"rank {event.rank} on {host} failed: {what_happened(event, memory=memory)}"


def what_happened(event: Event, *, memory: str = "") -> str:
    """The exception, the signal or the exit code."""
    if event.type:
        kind = event.type.removeprefix("instep.errors.")
        first = event.message.partition("\n")[0]
        text = first if len(first) <= _LONGEST else first[:_LONGEST] + " ..."
        return f"{kind}: {text}" if text else kind
    if event.signal:
        return f"killed by {signal_name(event.signal)}{_why_signal(event.signal, memory)}"
    return f"it left with exit code {event.exit_code}"


def signal_name(number: int) -> str:
    """``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def details(event: Event) -> list[str]:
    """What the exception said, below the headline; nothing for a process that ended without one."""
    return (event.traceback or event.message.partition("\n")[2]).splitlines()


def _why_signal(number: int, memory: str) -> str:
    if number == signal.SIGKILL:
        return f", {memory or 'often the out-of-memory killer: see  dmesg -T | grep -i killed'}"
    if number == signal.SIGBUS:
        return ", often a full /dev/shm (DataLoader workers share tensors through it): see  df -h /dev/shm"
    if number in {signal.SIGSEGV, signal.SIGABRT}:
        return ", in compiled code"
    return ""
