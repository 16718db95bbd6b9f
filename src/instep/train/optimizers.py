"""The optimizer: from what the user gives, over the parameters that are trained, with torch's fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from instep.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn
    from torch.optim import Optimizer


def build(
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer], model: nn.Module, *, fused: bool = True
) -> Optimizer:
    """The optimizer over the model's parameters.

    Args:
        optimizer: one made over ``model.parameters()``, or a function that makes one of a list of parameters; a
            function gets those that require a gradient.
        model: the bare model.
        fused: see :func:`fuse`.

    Raises:
        TrainError: it is neither, or it holds parameters that are not the model's.

    """
    made = optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        made = optimizer([one for one in model.parameters() if one.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise TrainError(
            f"This is no optimizer: {type(made).__name__}.",
            evidence=[repr(made)[:100]],
            cure="torch.optim.AdamW(model.parameters(), lr=1e-3), or a function: lambda parameters: AdamW(parameters)",
        )
    _check(made, model)
    if fused:
        fuse_all(made, model)
    return made


def _check(optimizer: Optimizer, model: nn.Module) -> None:
    known = {id(one) for one in model.parameters()}
    foreign = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in known]
    if foreign:
        raise TrainError(
            f"The optimizer holds {len(foreign)} parameters that are not the model's: they would not be trained.",
            evidence=[f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in foreign[:5]],
            cure="Make it over the parameters of the very model that is trained, after the model is complete:\n"
            "optimizer = torch.optim.AdamW(model.parameters())",
        )


def refuse_states(optimizer: Optimizer, strategy: str) -> None:
    """See that the optimizer has not begun, since its states could not follow the parameters to other ranks.

    Raises:
        TrainError: it has stepped.

    """
    # Adagrad makes its states when it is made: those that have not counted a step are as good as none.
    if any(float(values.get("step", 1)) > 0 for values in optimizer.state.values()):
        raise TrainError(
            f"The optimizer has stepped already: {strategy} shares out its states before the first step.",
            evidence=[f"{type(optimizer).__name__} with states of {len(optimizer.state)} parameters"],
            cure="Give a new one, and load the states from a checkpoint: resume=...",
        )


def fuse_all(optimizer: Optimizer, model: nn.Module) -> bool:
    """:func:`fuse` for all parameters of the optimizer, unless the model makes sparse gradients."""
    if any(getattr(one, "sparse", False) is True for one in model.modules()):
        return False
    return fuse(optimizer, [one for group in optimizer.param_groups for one in group["params"]])


def fuse(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Let one of torch's own optimizers use its fused kernel, where the user has not chosen another.

    The numbers stay the same but for rounding. Nothing happens to optimizers other than Adam, AdamW, SGD and Adagrad,
    to those with ``fused``, ``foreach``, ``capturable`` or ``differentiable`` set or a tensor as learning rate, to
    parameters of kinds or on devices for which torch has no such kernel, and where there are states already.

    Args:
        optimizer: not stepped yet.
        parameters: those that it steps.

    Returns:
        Whether it is fused now.

    """
    groups = optimizer.param_groups
    if not all(_left_open(group) for group in groups) or not _supported(optimizer, list(parameters)):
        return False
    for options in (optimizer.defaults, *groups):
        options["fused"] = True
    # What the constructors set with fused=True: step() looks at the parameters' devices, and heeds found_inf.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # noqa: SLF001
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]  # noqa: SLF001
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_fill_momentum)
    return True


def _fill_momentum(optimizer: Optimizer, *_: object) -> None:
    """Begin all momenta at zero: fused SGD fails on a parameter whose first gradient comes after those of others."""
    groups = optimizer.param_groups
    if len(optimizer.state) == sum(len(group["params"]) for group in groups):
        return
    for one in (one for group in groups if group["momentum"] for one in group["params"]):
        if one.grad is not None and one not in optimizer.state:
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)


def _left_open(group: dict[str, object]) -> bool:
    return (
        group.get("fused", False) is None
        and group.get("foreach") is None
        and not group.get("capturable")
        and not group.get("differentiable")
        and not group.get("dampening")  # it does not hold for a momentum's first step, which the kernel cannot know
        and not isinstance(group["lr"], torch.Tensor)
    )


def _supported(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not adam and type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
        return False
    if not adam and any(hasattr(one, "to_local") for one in parameters):
        return False  # DTensors: torch shares out these kernels' work for Adam only
    # Adagrad makes its states when it is made: their steps have to stay on the CPU.
    devices = {"cpu"} if isinstance(optimizer, torch.optim.Adagrad) else {"cpu", "cuda"}
    if not isinstance(optimizer, torch.optim.Adagrad) and optimizer.state:
        return False
    return all(one.is_floating_point() and one.device.type in devices for one in parameters)
