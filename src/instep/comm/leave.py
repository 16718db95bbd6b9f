"""Leave the world: together, the process that holds the store last."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from instep.comm import barriers, guarding, store_files
from instep.comm.logs import get_logger
from instep.comm.session import get_session, set_session
from instep.comm.waiting import wait_for
from instep.errors import StepError

if TYPE_CHECKING:
    from instep.comm.session import Session

_AT_EXIT_WAIT = 3.0  # seconds
_REST_WITHIN = 0.25  # seconds; a program's own busy threads must not hold up its end


def close(*, wait: bool = True, timeout: float | None = None) -> None:
    """Leave the world that ``instep.init()`` joined. Nothing happens if there is none.

    Ranks leave together: a rank that tears its connections down while another still reads its last message would
    show there as 'Connection reset by peer'. Then the rank that holds the store waits until the others have taken
    their last answer from it.

    Args:
        wait: whether to wait for the other ranks; False after an error.
        timeout: how long, in seconds; None: that of ``instep.init()``. Then this rank leaves all the same, with a
            warning that names who did not come.

    """
    session = get_session()
    if session is None:
        return
    guarding.leave()
    try:
        if wait and session.store is not None:
            _leave_together(session, session.timeout if timeout is None else timeout)
    finally:
        set_session(None)
        if wait or "nccl" not in session.backend:  # NCCL would wait for collectives that nobody ends
            _destroy()


def _leave_together(session: Session, timeout: float) -> None:
    store = session.store
    assert store is not None  # tested by close()
    start = time.monotonic()
    try:
        if not barriers.meet(session, "close", timeout):
            late = barriers.absent(session, "close")
            get_logger("instep").warning("left the world without ranks %s, which did not come to close()", late)
            return
        if not session.leaves_last:
            store.set(f"gone/{session.rank}", "1")
        else:
            keys = [f"gone/{other}" for other in range(session.world_size) if other != session.rank]
            left = max(0.0, timeout - (time.monotonic() - start))
            wait_for(store, keys, left, lambda: "waiting for the last ranks to leave")
        if session.world.init_method.startswith("file://"):
            store_files.remove(session.world)
    except (StepError, RuntimeError) as error:
        get_logger("instep").warning("left the world alone: %s", str(error).splitlines()[0])


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        let_threads_come_to_rest()
        dist.destroy_process_group()


def let_threads_come_to_rest() -> None:
    """Wait until no other thread of this process runs or wants to, a millisecond or two.

    When the last collective has ended, a thread of gloo still has to free its tensors, and needs Python's lock for it.
    If the group is destroyed in that moment, torch joins the thread while holding the lock: the process hangs (seen
    once in a thousand times with torch 2.6 and more ranks than cores). If the interpreter ends first, the thread
    aborts the process ('terminate called without an active exception').
    """
    end = time.monotonic() + _REST_WITHIN
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)  # lets go of the lock
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether another thread of this process is on a core, or waits for one: proc(5), the state in `stat`."""
    me = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("*"):
        try:
            state = (thread / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # it has just ended
            continue
        if state in ("R", "D") and thread.name != me:
            return True
    return False


def leave_at_exit() -> None:
    """What a script that forgot close() gets when the interpreter ends: a short wait, and none after an error."""
    failed = hasattr(sys, "last_type")  # set by Python when an exception ends the script
    if failed:
        guarding.leave(sys.last_value)
    close(wait=not failed, timeout=_AT_EXIT_WAIT)
