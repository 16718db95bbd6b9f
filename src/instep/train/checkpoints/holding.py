"""Locks on checkpoints, so that nobody deletes what somebody reads: other processes on the machine or the network too.

A reader holds a shared lock on the manifest; who deletes or replaces a checkpoint wants it alone. On a file system
without locks everybody goes on without.
"""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from instep.train.checkpoints.manifest import NAME, Unfit

if TYPE_CHECKING:
    from pathlib import Path

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05  # seconds


class Hold:
    """A shared lock on a checkpoint, from now to :meth:`release`.

    Args:
        folder: the checkpoint.

    Raises:
        Unfit: it is not there, or is being deleted.

    """

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        try:
            self._file = path.open("rb")
        except OSError:
            raise Unfit("it was deleted just now") from None
        try:
            if not _lock(self._file.fileno(), fcntl.LOCK_SH):
                raise Unfit("it is being deleted")
            if not _same(self._file.fileno(), path):
                raise Unfit("it was deleted just now")
        except Unfit:
            self.release()
            raise

    def release(self) -> None:
        """Let go. A second time does nothing."""
        if not self._file.closed:
            with suppress(OSError):  # said to the lock, since a forked child may have the same open file
                fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
            self._file.close()


def take_alone(folder: Path, within_s: float = 0.0) -> Hold | None:
    """A lock against all readers, None if there is one that does not end within that time.

    Raises:
        OSError: the checkpoint is not there.

    """
    hold = Hold.__new__(Hold)
    hold._file = (folder / NAME).open("r+b")  # type: ignore[assignment]  # noqa: SLF001  # NFS wants it writable
    end, pause = time.monotonic() + within_s, _FIRST_PAUSE
    while not _lock(hold._file.fileno(), fcntl.LOCK_EX):  # noqa: SLF001  # as above
        if time.monotonic() >= end:
            hold.release()
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    return hold


def _lock(fd: int, how: int) -> bool:
    """Whether the lock could be had at once, or there are no locks here."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _same(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    import os

    try:
        now = path.stat()
    except OSError:
        return False
    then = os.fstat(fd)
    return (then.st_dev, then.st_ino) == (now.st_dev, now.st_ino)
