"""DDP: every rank holds the whole model; gradients are averaged while the backward pass goes on."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from instep.errors import TrainError
from instep.train.optimizers import build
from instep.train.strategies.base import Strategy
from instep.train.strategies.hooks import check_hook, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.train.precision import Precision
    from instep.train.strategies.hooks import Hook


class DDP(Strategy):
    """``torch.nn.parallel.DistributedDataParallel``.

    Args:
        bucket_mb: gradients travel in buckets of so many MiB.
        comm_hook: send them shorter: ``"fp16"``, ``"bf16"`` (NCCL only), ``"powersgd"``.
        powersgd_rank: how many columns PowerSGD keeps of each gradient matrix.
        powersgd_start: at which step PowerSGD begins; before it, gradients travel whole. At least 2.
        find_unused_parameters: look through the graph of every step for parameters without a gradient: for models
            that use other parts at other steps. It costs time in every step.
        static_graph: promise that every step uses the same parameters in the same way. It allows parameters that
            are used several times with reentrant checkpointing; it does not go together with accumulation, and by
            itself makes nothing faster.
        gradient_as_bucket_view: gradients live in the buckets: one copy less in memory and time.
        broadcast_buffers: send the main rank's buffers (BatchNorm's running means) to all before every forward pass,
            if there are any.

    """

    name = "ddp"

    def __init__(
        self,
        *,
        bucket_mb: float = 25,
        comm_hook: Hook | None = None,
        powersgd_rank: int = 1,
        powersgd_start: int = 10,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        self.bucket_mb = bucket_mb
        self.comm_hook = comm_hook
        self.powersgd_rank = powersgd_rank
        self.powersgd_start = powersgd_start
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        session: Session,
        precision: Precision,  # noqa: ARG002  # autocast is all there is to it
        *,
        fused: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap the model; the optimizer stays as it is."""
        self._check(model, session)
        return self._wrap(model, session), build(optimizer, model, fused=fused)

    def no_sync(self, wrapped: Any) -> AbstractContextManager[None]:
        """Gradients stay here.

        Raises:
            TrainError: the graph was promised to be static: torch's reducer would end the process.

        """
        if self.static_graph:
            raise TrainError(
                "static_graph=True does not go together with accumulation: torch's reducer fails in its first step.",
                cure="DDP(static_graph=False), or accumulate=1.",
            )
        context: AbstractContextManager[None] = wrapped.no_sync()
        return context

    def refuse_unused(self, model: nn.Module) -> None:
        """See that every parameter got a gradient: DDP still waits for those of the others."""
        if not self.find_unused_parameters and not self.static_graph and (names := self.unused(model)):
            raise _unused(names)

    def explain(self, error: Exception, model: nn.Module) -> Exception:
        """Torch's error in the step after one in which parameters were left out, with their names."""
        text = str(error)
        if "Expected to have finished reduction in the prior iteration" not in text:
            return error
        trained = [name for name, one in model.named_parameters() if one.requires_grad]
        found = re.search(r"did not receive grad for rank \d+:([ \d]+)", text)
        numbers = [int(number) for number in found[1].split()] if found else []
        names = [trained[number] for number in numbers if number < len(trained)]
        return _unused(names or self.unused(model))

    def _check(self, model: nn.Module, session: Session) -> None:
        check_hook(self.comm_hook, session, start=self.powersgd_start)
        if not any(one.requires_grad for one in model.parameters()):
            raise TrainError(
                "The model has no parameter that requires a gradient: there is nothing to train.",
                cure="model.requires_grad_(True), or for a part of it.",
            )

    def _wrap(self, model: nn.Module, session: Session) -> DistributedDataParallel:
        # True is torch's default; the argument's name changed in newer torch.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        more: dict[str, Any] = {} if self.broadcast_buffers else {buffers: False}
        wrapped = DistributedDataParallel(
            model,
            device_ids=[session.device] if session.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            **more,
        )
        register(self.comm_hook, wrapped, rank=self.powersgd_rank, start=self.powersgd_start)
        return wrapped


def _unused(names: Sequence[str]) -> TrainError:
    shown = [*names[:20], *([f"... and {len(names) - 20} more"] if len(names) > 20 else [])]
    return TrainError(
        f"{len(names)} parameters got no gradient in a step: the loss does not depend on them, and DDP would wait.",
        evidence=shown,
        cure="Leave them out of the model, or freeze them: parameter.requires_grad_(False)\n"
        "If other steps use them: strategy=DDP(find_unused_parameters=True)",
    )
