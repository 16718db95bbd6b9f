"""The errors of instep: what is wrong, the evidence, and the command or change that mends it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

EXIT_USAGE = 2


class InstepError(Exception):
    """An error that a user can act on.

    Args:
        what: one sentence that says what is wrong.
        evidence: lines that show it: a variable and its value, a file and line, a host.
        cure: the command to type or the change to make.

    """

    exit_code = EXIT_USAGE

    def __init__(self, what: str, *, evidence: Sequence[str] = (), cure: str = "") -> None:
        super().__init__(what, tuple(evidence), cure)
        self.what = what
        self.evidence = tuple(evidence)
        self.cure = cure

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.evidence, self.cure)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {line}" for item in self.evidence for line in item.splitlines()]
        if self.cure:
            first, *rest = self.cure.splitlines()
            lines += [f"  → {first}", *(f"    {line}" for line in rest)]
        return "\n".join(lines)


def _rebuild(kind: type[InstepError], what: str, evidence: Sequence[str], cure: str) -> InstepError:
    return kind(what, evidence=evidence, cure=cure)


class WorldError(InstepError):
    """The environment does not say, or says in two ways, who this process is."""


class JoinError(InstepError):
    """The ranks could not meet."""


class StepError(InstepError):
    """A rank is missing where all ranks have to be, or does what only all ranks may do."""


class DataError(InstepError):
    """The data cannot be divided exactly as asked."""


class TrainError(InstepError):
    """What the trainer was given does not fit together, or training cannot go on."""


class CheckpointError(InstepError):
    """A checkpoint cannot be written, found or read as asked."""


class RunError(InstepError):
    """A run cannot be planned, started or recorded."""


def show(error: InstepError) -> None:
    """Print the error to standard error the way users meet it: no traceback of ours."""
    print(f"✗ {error}", file=sys.stderr, flush=True)


def speak_plainly() -> None:
    """From now on, an uncaught InstepError ends the process with its text and its exit code, without a traceback.

    All other exceptions go to the hook that was set before. (torch's init_process_group sets one that would swallow
    the exit code, so this is called again after it.)
    """
    before = sys.excepthook
    if getattr(before, "speaks_plainly", False) or threading.current_thread() is not threading.main_thread():
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InstepError):
            before(kind, error, trace)
            return
        show(error)
        # CPython ends with this code when an excepthook raises SystemExit (PyErr_PrintEx), after the usual clean-up.
        raise SystemExit(error.exit_code)

    hook.speaks_plainly = True  # type: ignore[attr-defined]  # a mark on the function
    sys.excepthook = hook
