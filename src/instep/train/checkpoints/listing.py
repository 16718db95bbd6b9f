"""What lies in a folder of checkpoints: the whole ones, and why the others are none."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instep.train.checkpoints import manifest, names

if TYPE_CHECKING:
    from pathlib import Path

BEST = "best.json"
_AGAIN, _PAUSE_S = 3, 0.02


@dataclass(frozen=True)
class Found:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        step: optimizer updates done when it was written.
        manifest: what its ``manifest.json`` says.

    """

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def serial(self) -> int:
        """The how-many-th checkpoint of its folder it is."""
        return int(self.manifest["serial"])


@dataclass
class Listing:
    """A look at a folder.

    Attributes:
        whole: checkpoints that are finished and have all their files in the right size, the newest first. The newest
            is the one that was written last: after going back to an earlier step it is not the one with the most steps.
        unfit: (name, why not) of what looks like a checkpoint and is none.

    """

    whole: list[Found] = field(default_factory=list)
    unfit: list[tuple[str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The listing for people."""
        there = ", ".join(one.path.name for one in self.whole[:20]) or "none"
        return [f"whole: {there}", *(f"{name}: {why}" for name, why in self.unfit[:10])]


def look(path: Path) -> Listing:
    """What lies in the folder. It may change at any moment: another process saves and deletes.

    Raises:
        OSError: the folder cannot be listed.

    """
    for number in range(_AGAIN):
        listing = _look_once(path)
        if listing.whole or not path.is_dir() or not any(path.iterdir()):
            break
        if number < _AGAIN - 1:  # a list that is read while names change may lack the old name and the new one
            time.sleep(_PAUSE_S)
    return listing


def _look_once(path: Path) -> Listing:
    listing = Listing()
    spare: list[Found] = []
    try:
        entries = sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError:
        return listing
    for name in entries:
        step, aside = names.step_of(name), names.read_aside(name)
        if step is not None:
            _judge(path / name, step, listing.whole, listing.unfit)
        elif aside is not None and aside.why == "replaced":
            _judge(path / name, aside.step, spare, [])
        elif aside is not None and aside.why == "partial" and not (aside.here and aside.alive):
            who = "the process that wrote it is gone" if aside.here else f"process {aside.pid} on {aside.machine[0]}"
            listing.unfit.append((name, f"step {aside.step} was not finished ({who})"))
    # What a process was about to replace when it was killed is still a checkpoint.
    steps = {one.step for one in listing.whole}
    listing.whole += [one for one in spare if one.step not in steps]
    listing.whole.sort(key=lambda one: (one.serial, one.step), reverse=True)
    return listing


def _judge(folder: Path, step: int, whole: list[Found], unfit: list[tuple[str, str]]) -> None:
    why = ""
    for _ in range(2):  # it may be replaced by another one between two looks
        try:
            whole.append(whole_at(folder, step))
        except manifest.Unfit as error:
            why = str(error)
        else:
            return
    if folder.exists():
        unfit.append((folder.name, why))


def whole_at(folder: Path, step: int | None = None) -> Found:
    """The checkpoint in this folder.

    Args:
        folder: of the checkpoint itself.
        step: what its name says, if it says one.

    Raises:
        manifest.Unfit: it is none, or not whole.

    """
    text = manifest.read(folder)
    if step is not None and text.get("step") != step:
        raise manifest.Unfit(f"it is of step {text.get('step')}, not of {step}")
    if wrong := manifest.wrong_sizes(folder, text):
        raise manifest.Unfit(", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    return Found(folder, int(text["step"]), text)


def best_step(path: Path) -> int | None:
    """The step that was marked as the best, None if none was."""
    try:
        return int(json.loads((path / BEST).read_bytes())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise manifest.Unfit(f"{BEST} cannot be read: {type(error).__name__}: {error}") from None
