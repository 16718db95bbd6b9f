"""A store in a file that all ranks see, and how a leftover of another job is told from the file of this one.

The form of the file is that of torch's FileStore (torch/csrc/distributed/c10d/FileStore.cpp): key and value, each
after its length in 4 bytes, one pair after the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import JoinError

if TYPE_CHECKING:
    from torch.distributed import Store

    from instep.world import World

_GRACE = 2.0  # seconds in which a rank of this job that has just made the file may not yet have written its name
_WHO = "who/"


def path_of(init_method: str) -> Path:
    """The path in ``file:///PATH``."""
    return Path(init_method.removeprefix("file://"))


def make(world: World) -> Store:
    """The store in the file, with this rank's name in it.

    Raises:
        JoinError: the folder is not there or not writable, the file is none of torch's, a leftover, or another job's.

    """
    from torch.distributed import FileStore

    path = path_of(world.init_method)
    _check_folder(path)
    _check_content(path, world)
    try:
        path.open("ab").close()  # torch would try for five minutes
    except OSError as error:
        raise JoinError(
            f"The rendezvous file cannot be written: {error.strerror}.",
            evidence=[f"{path} on {socket.gethostname()}"],
            cure="Choose a path in a folder of your own that all ranks see.",
        ) from None
    # Without a world size: then torch never removes the file, and the main rank does it in remove().
    store = FileStore(str(path), -1)
    _claim(store, path, world)
    return store


def remove(world: World) -> None:
    """Remove the file once all ranks have left (main rank), or wait until it is gone (the others).

    It would stand in the way of the next job, and of this one if it joins again.
    """
    path = path_of(world.init_method)
    if world.is_main:
        path.unlink(missing_ok=True)
        return
    end = time.monotonic() + 5.0  # a network file system may show it a while longer
    mine = f"/gone/{world.rank}".encode()  # not in the file that a fast main rank may already have made anew
    while mine in _content(path) and time.monotonic() < end:
        time.sleep(0.002)


def _check_folder(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise JoinError(
            "The rendezvous file cannot be made: its folder does not exist.",
            evidence=[f"{folder} on {socket.gethostname()}"],
            cure=f"Make it on a file system that all ranks see:  mkdir -p {folder}",
        )
    if path.is_dir():
        raise JoinError("The rendezvous file cannot be made: the path is a folder.", evidence=[str(path)])


def _check_content(path: Path, world: World) -> None:
    """Refuse a file that is none of torch's, and one in which no rank of instep has written its name."""
    end = time.monotonic() + _GRACE
    while content := _content(path):
        if not _is_store(content):
            raise JoinError(
                "This file is no rendezvous file, and is left as it is.",
                evidence=[f"{path} ({len(content)} bytes)"],
                cure="Name a path that does not exist yet.",
            )
        if b"/claim/" in content:
            return
        if time.monotonic() >= end:
            raise _not_ours(path, {}, world)
        time.sleep(0.01)


def _content(path: Path) -> bytes:
    """What is in the file, not in the middle of another rank's writing: under the lock that torch takes."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return file.read()
    except FileNotFoundError:
        return b""


def _is_store(content: bytes) -> bool:
    position = 0
    while position < len(content):
        if position + 4 > len(content):
            return False
        (length,) = struct.unpack_from("<I", content, position)
        position += 4 + length
    return position == len(content)


def _claim(store: Store, path: Path, world: World) -> None:
    """Write this rank's name into the file, and look who else has written there."""
    if store.add(f"claim/{world.rank}", 1) > 1:
        raise _not_ours(path, _read(store, world.rank) or {}, world)
    store.set(_WHO + str(world.rank), json.dumps(_myself()))
    others = [rank for rank in range(world.world_size) if rank != world.rank and store.check([f"claim/{rank}"])]
    for rank in others:
        who = _read(store, rank)
        if who is None or (who["host"] == socket.gethostname() and not _lives(who)):
            raise _not_ours(path, who or {}, world)


def _myself() -> dict[str, Any]:
    import psutil

    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _read(store: Store, rank: int) -> dict[str, Any] | None:
    end = time.monotonic() + _GRACE
    while not store.check([_WHO + str(rank)]):
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)
    who: dict[str, Any] = json.loads(store.get(_WHO + str(rank)))
    return who


def _lives(who: dict[str, Any]) -> bool:
    import psutil

    try:
        return bool(abs(psutil.Process(who["pid"]).create_time() - who["started"]) < 1.0)
    except psutil.Error:
        return False


def _not_ours(path: Path, who: dict[str, Any], world: World) -> JoinError:
    here = who.get("host") == socket.gethostname()
    if who and here and _lives(who):
        what = (
            "Another job is using this rendezvous file, or two processes of this job say that they are the same rank."
        )
        cure = "Give each job a file of its own, for instance with the job's id in its name."
    else:
        what = "The rendezvous file is a leftover of a job that did not end cleanly."
        cure = f"Remove it:  rm {path}\nor give each job a file of its own, for instance with the job's id in its name."
    writer = f"rank {world.rank} in it: pid {who['pid']} on {who['host']}" if who else "written by an unknown process"
    age = time.time() - path.stat().st_mtime
    return JoinError(what, evidence=[f"{path}, last written {age:.0f} s ago", writer], cure=cure)
