"""An optimizer's state by the names of the bare model's parameters, so that it fits every strategy and world size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from instep.errors import TrainError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

# How an optimizer computes is this run's, not the checkpoint's: the device may be another one.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")


def bare(wrapped: nn.Module) -> nn.Module:
    """The user's model inside what training calls."""
    return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``{"begun": ..., "state": {name: {key: value}}, "groups": [{"params": [names], option: value}]}``.

    The tensors are the living ones. An optimizer that has not stepped yet gets states of the right shapes to load
    into; ``begun`` says that they mean nothing by themselves.
    """
    begun = bool(optimizer.state)
    names: dict[Any, str] = {one: name for name, one in model.named_parameters()}
    values = dict(optimizer.state) if begun else _beginning(optimizer)
    state = {names[one]: dict(value) for one, value in values.items()}
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    return {"begun": begun, "state": state, "groups": groups}


def _beginning(optimizer: Optimizer) -> dict[Any, Any]:
    """The states after a step with no gradient and no learning rate; the optimizer is as before."""
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    kept = [(one, one.grad) for one in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    states = dict(optimizer.state)
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for one, gradient in kept:
        one.grad = gradient
    return states


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take up what :func:`optimizer_state` gave; parameters that it does not know begin anew.

    Raises:
        TrainError: the parameters were grouped in another way.

    """
    names = {one: name for name, one in model.named_parameters()}
    numbers: dict[str, int] = {}
    groups = []
    for place, group in enumerate(optimizer.param_groups):
        mine = [names[one] for one in group["params"]]
        numbers |= {name: len(numbers) + number for number, name in enumerate(mine)}
        kernels = {key: group[key] for key in _KERNELS if key in group}
        groups.append({**_saved(state["groups"], mine, place), **kernels, "params": [numbers[name] for name in mine]})
    values = {numbers[name]: value for name, value in state["state"].items() if name in numbers}
    optimizer.load_state_dict({"state": values if state["begun"] else {}, "param_groups": groups})


def _saved(groups: list[dict[str, Any]], names: list[str], place: int) -> dict[str, Any]:
    """The saved group with these parameters. One without parameters (a rank's part of it) is known by its place."""
    for group in groups if names else groups[place : place + 1]:
        if set(names) <= set(group["params"]):
            return group
    raise TrainError(
        "The optimizer's parameters are grouped in another way than in the checkpoint.",
        evidence=[
            f"now one group has: {', '.join(names[:5])} ({len(names)})",
            *(f"then: {', '.join(group['params'][:5])} ({len(group['params'])})" for group in groups[:5]),
        ],
        cure="Make the optimizer as it was made then, or load the model's weights only.",
    )
