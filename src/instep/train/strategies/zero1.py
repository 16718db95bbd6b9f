"""ZeRO, stage 1: every rank holds the whole model, and the optimizer's states of a part of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from instep.comm import gather_objects
from instep.errors import TrainError
from instep.train.optimizers import fuse_all, refuse_states
from instep.train.strategies.ddp import DDP
from instep.train.strategies.states import bare, load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.train.precision import Precision


class Zero1(DDP):
    """``torch.distributed.optim.ZeroRedundancyOptimizer`` over DDP.

    Each rank steps its part of the parameters and sends them to the others. The optimizer is made anew, of the same
    class with the same options and parameter groups as the one given, over each rank's part. Its states go to a
    checkpoint part by part, from every rank: nothing has to be consolidated before a rank may save.

    Args:
        parameters_as_bucket_view: parameters live in one piece of memory for each rank that owns them: one message
            for each rank instead of one for each parameter.
        options: those of :class:`DDP`.

    """

    name = "zero1"

    def __init__(self, *, parameters_as_bucket_view: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.parameters_as_bucket_view = parameters_as_bucket_view

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        session: Session,
        precision: Precision,
        *,
        fused: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap the model, and share out the optimizer."""
        wrapped, whole = super().prepare(model, optimizer, session, precision, fused=False)
        refuse_states(whole, "zero1")
        shared = self._share(whole)
        if fused and fuse_all(shared.optim, model):
            for group in shared.param_groups:  # their options are copied to the part's in every step
                group["fused"] = True
        return wrapped, shared

    def _share(self, whole: Optimizer) -> ZeroRedundancyOptimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = type(whole)
        known = inspect.signature(kind).parameters
        options = {key: value for key, value in whole.defaults.items() if key in known}
        # One bucket holds one type only.
        types = {one.dtype for group in whole.param_groups for one in group["params"]}
        views = self.parameters_as_bucket_view and len(types) == 1
        try:
            return ZeroRedundancyOptimizer(
                whole.param_groups, kind, parameters_as_bucket_view=views, overlap_with_ddp=False, **options
            )
        except (TypeError, ValueError) as error:
            raise TrainError(
                f"zero1 cannot make a {kind.__name__} over each rank's part of the parameters.",
                evidence=[f"{kind.__name__}(groups, {', '.join(options)}): {error}"],
                cure="An optimizer whose constructor takes groups of parameters and its options by name; or 'ddp'.",
            ) from error

    def state(self, wrapped: nn.Module, optimizer: Any) -> dict[str, Any]:
        """As for DDP; of the optimizer's tensors only those that this rank owns."""
        model = bare(wrapped)
        mine = optimizer_state(model, optimizer.optim)
        # A rank may own no parameter at all, and plain values have to be the same everywhere.
        plain = {
            name: {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
            for name, values in mine["state"].items()
        }
        everyone = gather_objects((mine["begun"], plain))
        names = {one: name for name, one in model.named_parameters()}
        state: dict[str, dict[str, Any]] = {}
        for _, theirs in everyone:
            state |= {name: values for name, values in theirs.items() if values}
        return {
            "model": model.state_dict(),
            "optimizer": {
                "begun": any(begun for begun, _ in everyone),
                "state": {**state, **mine["state"]},
                "groups": [
                    {**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups
                ],
            },
        }

    def load_state(self, wrapped: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """As for DDP: each rank takes what it owns."""
        model = bare(wrapped)
        model.load_state_dict(state["model"])
        load_optimizer_state(model, optimizer.optim, state["optimizer"])
        for group, loaded in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
