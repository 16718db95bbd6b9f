"""What the forward pass computes in, and the check that gradients are finite: once per step, without waiting for it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from instep.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from instep.train.strategies.base import Strategy

Name = Literal["fp32", "bf16", "fp16"]


class Precision:
    """One of fp32, bf16 and fp16: autocast for the forward pass, the scale of the loss for fp16.

    A step is, in this order::

        with precision.autocast():
            loss = ...
        precision.scale(loss).backward()                                   # for each micro-batch
        found = precision.unscale_and_check(parameters, optimizer, strategy)  # once, and no later than clipping
        strategy.clip(parameters, max_norm)
        precision.step(optimizer, found)                                   # nothing where found is 1
        precision.update()

    Args:
        name: ``"fp32"``, ``"bf16"`` or ``"fp16"``. The parameters, gradients and optimizer states are float32 in all
            three: matrix products and convolutions are computed in the shorter type.
        device: where the model is.

    Attributes:
        name: as given.
        dtype: what autocast computes in, None for fp32.

    Raises:
        TrainError: there is no such precision.

    """

    def __init__(self, name: Name, device: torch.device) -> None:
        if name not in get_args(Name):
            raise TrainError(f"There is no precision {name!r}.", cure=f"One of {', '.join(map(repr, get_args(Name)))}.")
        self.name: Name = name
        self.device = device
        self.dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        self._scaler = _scaler(device) if name == "fp16" else None
        self._nothing = contextlib.nullcontext()
        self._one = torch.ones((), device=device)
        self._one_kind: bool | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward passes run in."""
        if self.dtype is None:
            return self._nothing
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward()`` on."""
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return scaled

    def unscale_and_check(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, strategy: Strategy) -> Tensor:
        """Take the scale out of the gradients, and see whether one of them is not finite on any rank.

        Nothing waits for a GPU here: the answer is a tensor.

        Args:
            parameters: those with the gradients of a whole window.
            optimizer: the one that will step.
            strategy: says whether ranks hold different gradients.

        Returns:
            1 if a gradient has an infinity or NaN, 0 if not: shape (), float32, on the model's device, and the same
            on every rank.

        Raises:
            RuntimeError: it is called twice in a step, for fp16.

        """
        if self._scaler is not None:
            agreed: Tensor = self._scaler.unscale_and_check(parameters, optimizer, strategy)
            return agreed
        found = torch.zeros((), device=self.device)
        if self._one_kind is None:
            self._one_kind = _of_one_kind(parameters, self.device)
        gradients = [gradient for one in parameters if (gradient := one.grad) is not None]
        if self._one_kind and not any(gradient.is_sparse for gradient in gradients):
            # The same check without sorting: it is made at every step, and small steps notice.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self._one)
        else:
            _unscale(parameters, self._one, found)
        return strategy.any_nonfinite(found)

    def step(self, optimizer: Optimizer, found: Tensor) -> None:
        """Step the optimizer, unless `found` is 1.

        A fused kernel on a GPU looks at `found` by itself, so that the CPU need not wait for the answer; the
        optimizer's and the schedule's own counters of calls count such a step.
        """
        if found.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False) and _plain(optimizer):
            # The way of torch's GradScaler: gradients are unscaled already, so there is no scale.
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif not found.item():
            optimizer.step()

    def update(self) -> None:
        """After each step, skipped or not: adapt the scale of fp16."""
        if self._scaler is not None:
            self._scaler.update()

    def get_scale(self) -> float:
        """What the loss is multiplied by now; 1 for fp32 and bf16. Waits for the GPU."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values, none for fp32 and bf16."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; that of another precision is left alone."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def _plain(optimizer: Optimizer) -> bool:
    first = next((one for group in optimizer.param_groups for one in group["params"]), None)
    return not hasattr(first, "to_local")


def _of_one_kind(parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Whether all parameters are plain tensors of one dtype on this device."""
    return len({one.dtype for one in parameters}) == 1 and all(
        one.device == device and local(one) is one for one in parameters
    )


def _unscale(parameters: Iterable[nn.Parameter], inverse: Tensor, found: Tensor) -> None:
    """Multiply all gradients by `inverse`, in place; set `found` to 1 if one of this rank's is not finite."""
    for (device, _), gradients in _by_kind(parameters).items():
        if device == found.device:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)  # GradScaler's
        else:
            there = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, there, inverse.to(device))
            found.copy_(torch.maximum(found, there.to(found.device)))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has; any other tensor itself."""
    # Importing DTensor to ask isinstance() would take half a second, for those who have none.
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _by_kind(parameters: Iterable[nn.Parameter]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The gradients, or this rank's parts of them, by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for one in parameters:
        if (gradient := one.grad) is None:
            continue
        gradient = local(gradient)
        if gradient.is_sparse:
            # Several entries for one place are summed, which may overflow: look at the sums.
            one.grad = gradient.coalesce()
            gradient = one.grad._values()  # noqa: SLF001  # torch's only way to change them in place
        kinds[gradient.device, gradient.dtype].append(gradient)
    return kinds


def _scaler(device: torch.device) -> Any:
    """Torch's GradScaler, whose check all ranks make together where each holds other gradients."""

    class Scaler(torch.amp.GradScaler):
        def unscale_and_check(
            self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, strategy: Strategy
        ) -> Tensor:
            self.now = parameters, strategy
            self.unscale_(optimizer)
            return self.found

        def _unscale_grads_(
            self,
            optimizer: Optimizer,  # noqa: ARG002  # the parameters are at hand
            inv_scale: Tensor,
            found_inf: Tensor,
            allow_fp16: bool,  # noqa: ARG002
        ) -> dict[torch.device, Tensor]:
            # The inner half of unscale_(). The outer half sees to it that it is called once a step, and keeps the
            # result for update().
            parameters, strategy = self.now
            _unscale(parameters, inv_scale, found_inf)
            self.found = strategy.any_nonfinite(found_inf)
            return {self.found.device: self.found}

    return Scaler(device.type)
