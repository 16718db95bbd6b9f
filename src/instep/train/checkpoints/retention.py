"""Which checkpoints go, and what dead processes have left behind."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from instep.train.checkpoints import holding, listing, manifest, names

if TYPE_CHECKING:
    from pathlib import Path

_DEAD_AFTER_S = 3600.0  # of silence from another machine


def tidy(path: Path, keep: int, just_saved: int) -> None:
    """Delete the whole checkpoints beyond the newest `keep`: not the best, not one that is being read.

    Args:
        path: the folder of the checkpoints.
        keep: how many stay.
        just_saved: the step that stands since a moment ago, and stays.

    Raises:
        OSError: the folder cannot be listed.

    """
    try:
        best = listing.best_step(path)
    except manifest.Unfit:
        return  # nobody knows which one it is: delete none
    for one in listing.look(path).whole[keep:]:
        if one.step not in (best, just_saved) and names.step_of(one.path.name) is not None:
            delete(path, one)


def delete(path: Path, one: listing.Found) -> bool:
    """Delete a checkpoint, unless somebody reads it. Whether it is gone."""
    try:
        hold = holding.take_alone(one.path)
    except FileNotFoundError:
        return True
    except OSError:  # a manifest that must not be written to: somebody protects it
        return False
    if hold is None:
        return False
    try:
        removed = path / names.aside(one.step, "removed")
        one.path.rename(removed)
    finally:
        hold.release()
    shutil.rmtree(removed, ignore_errors=True)
    return True


def sweep(path: Path, now: float) -> list[str]:
    """Clean up after processes that were killed at work here.

    A folder of a process of this machine goes if that process does not run any more; of another machine, if nothing
    in it was touched for an hour. So a job that is still alive loses nothing.

    Args:
        path: the folder of the checkpoints.
        now: the time by the clock of the file system that holds it.

    Returns:
        The names of unfinished checkpoints that are gone now.

    """
    gone = []
    for name in sorted(entry.name for entry in path.iterdir()):
        aside = names.read_aside(name)
        if aside is None or (aside.alive if aside.here else _touched(path / name) > now - _DEAD_AFTER_S):
            continue
        target = path / names.name_of(aside.step)
        if aside.why == "replaced" and not target.exists():
            (path / name).rename(target)
            continue
        if aside.why == "seen":
            (path / name).unlink(missing_ok=True)
            continue
        shutil.rmtree(path / name, ignore_errors=True)
        if aside.why == "partial":
            gone.append(name)
    return gone


def _touched(folder: Path) -> float:
    """When something in a folder was last changed."""
    latest = 0.0
    for one in (folder, *folder.iterdir()) if folder.is_dir() else (folder,):
        try:
            latest = max(latest, one.stat().st_mtime)
        except OSError:
            return float("inf")  # it changes right now
    return latest
