"""The folder in memory in which a job's ranks and their watch meet."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "instep-guard-"
_YOUNG_S = 60.0  # a folder that is just being made has no lock yet


def make_folder() -> tuple[Path, int]:
    """A folder in memory, with a lock that says that its launcher lives; those of launchers that were killed go."""
    base = _base()
    _clean(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    return folder, hold(folder)


def shared_folder(name: str) -> Path:
    """A folder that all ranks of one machine call by the same name: whoever comes first makes it.

    Raises:
        OSError: it cannot be made, or is somebody else's.

    """
    folder = _base() / f"{_PREFIX}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")
    return folder


def hold(folder: Path) -> int:
    """Say that the folder is in use for as long as the descriptor that is returned is open.

    Raises:
        OSError: somebody else holds it.

    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def clean() -> None:
    """Remove what killed launchers and side-cars of this user have left."""
    _clean(_base())


def _base() -> Path:
    base = Path("/dev/shm")  # noqa: S108  # made with a name of its own and for this user alone
    return base if os.access(base, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _clean(base: Path) -> None:
    """Remove what killed launchers of this user have left: nobody holds its lock."""
    for folder in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            stat = folder.lstat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
