"""The table of faults: what was done to a run, and what came of it. Tests note it; it is printed at the end."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One line.

    Attributes:
        what: was done.
        seconds: until nothing of the job was left on any machine, or until a start was refused.
        code: the exit code of ``instep run``.
        said: the first line of its own that says what is wrong.

    """

    what: str
    seconds: float
    code: int
    said: str


TABLE: list[Fault] = []


def note(what: str, seconds: float, code: int, err: str) -> None:
    """Add a line.

    Args:
        what: was done.
        seconds: until nothing was left.
        code: the exit code.
        err: what came on standard error.

    """
    said = next((line for line in err.splitlines() if line.startswith(("✗", "■", "↻"))), "")
    TABLE.append(Fault(what, seconds, code, said))


def lines() -> list[str]:
    """The table, as wide as its first three columns need."""
    wide = max((len(fault.what) for fault in TABLE), default=0)
    head = f"{'what was done':<{wide}}  nothing left after  exit code  what was said"
    rows = [f"{one.what:<{wide}}  {one.seconds:>16.1f} s  {one.code:>9}  {one.said[:110]}" for one in TABLE]
    return [head, *rows] if rows else []
