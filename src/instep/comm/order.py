"""Work that one rank does first, or alone."""

from __future__ import annotations

import functools
import sys
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from instep.comm.session import current, is_main
from instep.comm.waiting import store_gone, wait_for
from instep.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instep.comm.session import Session

P = ParamSpec("P")
R = TypeVar("R")

_alone: ContextVar[tuple[str, str]] = ContextVar("alone", default=("", ""))  # (which piece, where)
_DONE, _FAILED = "done", "failed "


def refuse_if_alone(piece: str) -> None:
    """Stop a rank that asks for something shared where only it may be, at once instead of in a hang.

    Raises:
        StepError: this code runs inside a @main_only function, or is the main rank's turn in main_first().

    """
    where = _alone.get()[1]
    if where:
        raise StepError(
            f"{piece} needs all ranks, but is called inside {where}, where the other ranks are not: "
            "they would wait for ever.",
            evidence=[_caller()],
            cure=f"Move {piece} out of it, to where every rank comes by.",
        )


@contextmanager
def main_first(scope: Literal["world", "node"] = "world", timeout: float | None = None) -> Iterator[None]:
    """Let the main rank go through a block before the others.

    ::

        with instep.main_first():
            data = download_and_unpack(folder)  # the main rank does it, the others find it done

    If the block raises on the rank that goes first, the others raise too instead of waiting.

    Args:
        scope: ``world``: rank 0 goes first, for a folder that all nodes share; ``node``: local rank 0 of each node,
            for a disk of its own.
        timeout: how long the others wait, in seconds; None: as long as it takes, with a line on the screen each
            minute.

    Raises:
        StepError: the rank that goes first failed, is gone, or did not end in time; or the ranks have not joined.

    """
    if scope not in ("world", "node"):
        raise StepError(f"main_first() does not know scope={scope!r}.", cure="Give 'world' or 'node'.")
    session = current("main_first")
    first, name = _first_of(session, scope)
    if not first or _alone.get()[0] == "main_only":  # the first of all may take its turns one in the other
        refuse_if_alone("main_first")
    key = f"first/{session.turn('main_first')}/{name}"
    if not first:
        _wait_for_first(session, key, timeout, f"main_first() at {_caller()}")
        yield
        return
    token = _alone.set(("main_first", f"main_first() at {_caller()}"))
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        _tell(session, key, _FAILED + text[-8000:])
        raise
    finally:
        _alone.reset(token)
    _tell(session, key, _DONE)


def main_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make a function that runs on the main rank alone, and gives None on the others.

    ::

        @instep.main_only
        def save(path): ...

    A collective inside it is an error at once (:class:`instep.errors.StepError`), since the others are not there.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if not is_main():
            return None
        with alone(f"@main_only {function.__qualname__}()"):
            return function(*args, **kwargs)

    return run


@contextmanager
def alone(where: str) -> Iterator[None]:
    """A block that only the main rank runs: whatever asks for the other ranks inside is an error that names `where`."""
    token = _alone.set(("main_only", where))
    try:
        yield
    finally:
        _alone.reset(token)


def _first_of(session: Session, scope: str) -> tuple[bool, str]:
    """(whether this rank goes first, the name of those who wait for the same rank)."""
    if scope == "world":
        return session.is_main, "world"
    world = session.world
    if world.local_rank is None or world.node_rank is None:
        raise StepError(
            "main_first(scope='node') has to know the nodes, and this process group does not tell.",
            cure="Join with instep.init() in place of torch.distributed.init_process_group().",
        )
    return world.local_rank == 0, f"node{world.node_rank}"


def _tell(session: Session, key: str, text: str) -> None:
    if session.store is None:
        return
    try:
        session.store.set(key, text)
    except RuntimeError as error:
        raise store_gone(error) from None


def _wait_for_first(session: Session, key: str, timeout: float | None, where: str) -> None:
    store = session.store
    assert store is not None  # a rank that waits is not alone
    if not wait_for(store, [key], timeout, lambda: f"waiting for the main rank in {where}"):
        raise StepError(
            f"The main rank did not end its turn within {timeout:g} s.",
            evidence=[where],
            cure="Give more time, main_first(timeout=...), or look at what it does:  py-spy dump --pid PID",
        )
    text = bytes(store.get(key)).decode(errors="replace")
    if text.startswith(_FAILED):
        raise StepError(
            f"The main rank failed in {where}, so this rank cannot go on.",
            evidence=[text.removeprefix(_FAILED).rstrip()],
        )


def _caller() -> str:
    """The file and line outside of this package (and of contextlib) that called."""
    frame = sys._getframe(1)  # noqa: SLF001  # what traceback.walk_stack starts from, too
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("instep.", "contextlib")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
