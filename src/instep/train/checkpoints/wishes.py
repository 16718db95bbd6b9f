"""What the user wishes: when to save, where, how many to keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from instep.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoints:
    """When to save, where, and how many to keep.

    Args:
        folder: where the checkpoints lie, a folder that all ranks see; None: ``checkpoints`` in the run's folder.
        every_steps: save after each so many steps; None: not by steps.
        every_epochs: save after each so many epochs, and at the end; None: not by epochs.
        keep: how many of the newest to keep. The best one is kept besides.
        best: mark the one with the best monitored value.
        asynchronous: let training go on while the files are written.
        export: write the final weights as ``model.safetensors`` (``model.pt`` without that package) in the end.

    Raises:
        CheckpointError: one of them makes no sense.

    """

    folder: str | Path | None = None
    every_steps: int | None = None
    every_epochs: int | None = 1
    keep: int = 2
    best: bool = True
    asynchronous: bool = True
    export: bool = False

    def __post_init__(self) -> None:
        if self.folder is not None and not isinstance(self.folder, (str, Path)):
            raise CheckpointError(
                f"Checkpoints(folder={self.folder!r}) is no path.", cure="Checkpoints(folder='runs/mine/checkpoints')"
            )
        for name in ("every_steps", "every_epochs"):
            value = getattr(self, name)
            if value is not None:
                count(f"Checkpoints({name}=...)", value, or_none=True)
        count("Checkpoints(keep=...)", self.keep)
        for name in ("best", "asynchronous", "export"):
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(
                    f"Checkpoints({name}={getattr(self, name)!r}) is neither True nor False.",
                    cure=f"Checkpoints({name}=True)",
                )


def count(what: str, value: object, *, least: int = 1, or_none: bool = False) -> None:
    """Refuse what is no whole number from `least` on.

    Raises:
        CheckpointError: it is none.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(
            f"{what} has to be a whole number from {least} on{', or None' if or_none else ''}.",
            evidence=[f"given: {value!r}"],
        )
