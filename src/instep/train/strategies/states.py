"""Model and optimizer as nested dicts by parameter names, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

# How an optimizer computes is this run's, not the checkpoint's: the device may be another one.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")


def states(wrapped: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``{"model": ..., "optimizer": {"state": {name: ...}, "param_groups": [...]}}``, the living tensors."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {"model": get_model_state_dict(wrapped), "optimizer": optimizer_state(wrapped, optimizer)}


def load_states(wrapped: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take up what :func:`states` gave."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(wrapped, state["model"])
    load_optimizer_state(wrapped, optimizer, state["optimizer"])


def optimizer_state(wrapped: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter names; as it begins, where it has none yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fresh = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(wrapped, optimizer)
    if fresh:
        # Torch makes a state by a step at learning rate 0, and that step counts: the next one would be the second.
        for values in state["state"].values():
            if "step" in values:
                values["step"].zero_()
        optimizer.state.clear()
    return state


def load_optimizer_state(wrapped: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take up what :func:`optimizer_state` gave, but for the choice of kernels."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    kernels = [{key: group[key] for key in _KERNELS if key in group} for group in optimizer.param_groups]
    set_optimizer_state_dict(wrapped, optimizer, state)
    for group, kernel in zip(optimizer.param_groups, kernels, strict=True):
        group.update(kernel)
