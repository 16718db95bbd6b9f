"""Wait for keys of a store: with a limit, with a word about it on the screen, open to Ctrl-C.

The store's own ``wait`` prints C++ warnings when its time is up and cannot be interrupted, so this looks again and
again, less and less often.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from instep.comm.logs import get_logger
from instep.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.1  # seconds
_SPEAK_AFTER, _SPEAK_AGAIN = 10.0, 60.0  # seconds


def wait_for(
    store: Store, keys: Sequence[str], timeout: float | None, doing: Callable[[], str], stop: str | None = None
) -> bool:
    """Wait until all keys are there.

    Args:
        store: where to look.
        keys: what to look for.
        timeout: seconds; None waits for ever.
        doing: what to tell the user after ten seconds, and each minute from then on.
        stop: a key that ends the wait as soon as it is there.

    Returns:
        Whether all keys are there: False when the time is up or `stop` was found.

    Raises:
        StepError: the process that holds the store is gone.

    """
    start = time.monotonic()
    pause, speak_at = _FIRST_PAUSE, start + _SPEAK_AFTER
    while not _there(store, keys):
        now = time.monotonic()
        if stop is not None and _there(store, [stop]):
            return _there(store, keys)
        if timeout is not None and now - start >= timeout:
            return False
        if now >= speak_at:
            get_logger("instep").warning("%s (for %.0f s)", doing(), now - start)
            speak_at = now + _SPEAK_AGAIN
        time.sleep(pause if timeout is None else min(pause, max(0.0, start + timeout - now)))
        pause = min(pause * 1.3, _LAST_PAUSE)
    return True


def _there(store: Store, keys: Sequence[str]) -> bool:
    try:
        return bool(store.check(list(keys)))
    except RuntimeError as error:  # torch.distributed.DistNetworkError, and its like before torch 2.7
        raise store_gone(error) from None


def store_gone(error: BaseException) -> StepError:
    """The error for a store that does not answer any more."""
    return StepError(
        "The process through which the ranks find each other (the main rank, or torchrun's agent) is gone.",
        evidence=[str(error).splitlines()[0][:200] if str(error) else type(error).__name__],
        cure="Look at the main rank's output first: it ended before this rank did.",
    )
