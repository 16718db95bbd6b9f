"""Be alone with a folder: the lock is on the folder itself, so no file is left, and it goes with the process."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def hold(folder: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Alone with this folder, which is made if it is not there, and may be removed meanwhile.

    Args:
        folder: which.
        busy: is called when another process has it; if it raises nothing, the other's end is waited for.

    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed by who had it
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy()
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is(handle, folder):
                yield
                return
        finally:
            os.close(handle)


def is_free(folder: Path) -> bool:
    """Nobody is alone with this folder at the moment."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _is(handle: int, folder: Path) -> bool:
    """The folder of that name is the one that is open."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), folder.stat())
    return False
