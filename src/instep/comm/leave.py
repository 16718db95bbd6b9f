"""Leave the world: together, the process that holds the store last."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from instep.comm import barriers, store_files
from instep.comm.logs import get_logger
from instep.comm.session import get_session, set_session
from instep.comm.waiting import wait_for
from instep.errors import StepError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from instep.comm.session import Session

_AT_EXIT_WAIT = 3.0  # seconds


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


_former_group: list[ProcessGroup] = []


def _destroy() -> None:
    """Leave torch's group, and let the object itself live until the next one is left.

    Its destructor joins gloo's threads while it holds Python's lock, and such a thread may just be waiting for that
    lock, to free the tensors of the last collective: once in a thousand times the process hangs (torch 2.6, with
    fewer cores than ranks). Later these threads are idle.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        _former_group[:] = [dist.distributed_c10d._get_default_group()]  # noqa: SLF001  # torch has no public name
        dist.destroy_process_group()


def leave_at_exit() -> None:
    """What a script that forgot close() gets when the interpreter ends: a short wait, and none after an error."""
    failed = hasattr(sys, "last_type")  # set by Python when an exception ends the script
    close(wait=not failed, timeout=_AT_EXIT_WAIT)
