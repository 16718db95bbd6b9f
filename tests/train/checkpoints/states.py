"""States that know which step they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from instep.train.checkpoints import CheckpointFolder


def state_of(step: int, size: int = 64) -> dict[str, Any]:
    """A nested state, every number of which is the step."""
    return {
        "model": {f"layer.{n}.weight": torch.full((size, 3), float(step)) for n in range(3)},
        "optimizer": {
            "state": {0: {"exp_avg": torch.full((size,), float(step)), "step": torch.tensor(float(step))}},
            "param_groups": [{"lr": float(step), "betas": (0.9, 0.999), "params": [0, 1]}],
        },
    }


def step_in(state: dict[str, Any]) -> float:
    """The step that the whole state is of."""
    tensors = [*state["model"].values(), *state["optimizer"]["state"][0].values()]
    found = {float(value) for tensor in tensors for value in tensor.flatten().tolist()}
    found.add(state["optimizer"]["param_groups"][0]["lr"])
    (step,) = found
    return step


def save(folder: CheckpointFolder, step: int, size: int = 64, **more: Any) -> list[Path]:
    """Save a state of that step, and wait until it stands."""
    return folder.save(step, state_of(step, size), {"ema": {"w": torch.full((2,), float(step))}}, {}, {}, **more) + (
        folder.wait()
    )


def standing(path: Path) -> list[str]:
    """The names of the checkpoints in a folder."""
    return sorted((entry.name for entry in path.glob("step-*")), key=lambda name: int(name.partition("-")[2]))


def hidden(path: Path) -> list[str]:
    """The names of what is being worked on, or was."""
    return sorted(entry.name for entry in path.glob(".*"))
