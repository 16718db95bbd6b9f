"""What every strategy can do: the one interface between the training step and torch's engines."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from instep.comm import is_main
from instep.errors import TrainError
from instep.train.strategies.states import bare, load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from instep.comm import Session
    from instep.train.precision import Precision


class Strategy(ABC):
    """How the ranks share one training: which copies or parts of the model each one holds, and who talks when.

    All methods but :meth:`unused`, :meth:`no_sync`, :meth:`blocks` and :meth:`explain` are called by all ranks
    together: they may be collective.

    Attributes:
        name: what it is called in arguments and in the summary.
        collective_forward: a forward pass talks to the other ranks, so that every rank has to take every forward
            pass, in evaluation too.
        shards_gradients: a rank holds only a part of the reduced gradients, so that norms and finite checks are sums
            over the ranks.

    """

    name: ClassVar[str]
    collective_forward: ClassVar[bool] = False
    shards_gradients: ClassVar[bool] = False

    @abstractmethod
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        session: Session,
        precision: Precision,
        *,
        fused: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """Put the model and its optimizer to work.

        Args:
            model: the bare model, on the session's device, with equal weights on all ranks.
            optimizer: one made over ``model.parameters()`` that has not stepped yet, or a function of parameters.
            session: the world.
            precision: what the forward pass computes in.
            fused: let torch's own optimizers use their fused kernels where the user did not choose.

        Returns:
            (the module that training calls, the optimizer that training steps).

        Raises:
            TrainError: model, optimizer, options and backend do not fit together.

        """

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002  # for those that sync
        """Inside, gradients stay with their rank: for all micro-batches of a window but the last."""
        return contextlib.nullcontext()

    def gradient_divisor(self, session: Session) -> int:
        """What the engine divides the summed gradients by: a loss that is a sum has to be multiplied by it."""
        return session.world_size

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients, over all ranks: the same number on every rank. Shape (), on their device."""
        return torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; the norm before, as :meth:`norm` gives it."""
        norm = self.norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def any_nonfinite(self, found: Tensor) -> Tensor:
        """1 on every rank if it is 1 on one: `found` itself where all ranks hold the same gradients."""
        return found

    def state(self, wrapped: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint keeps: ``{"model": ..., "optimizer": ...}``, by the bare model's parameter names.

        The tensors are the living ones, or this rank's parts of them (DTensors, or, under zero1, the states of the
        parameters that this rank owns), for ``torch.distributed.checkpoint``, which puts the parts together in
        saving and hands them out again in loading, at any world size and to any strategy. All other values are
        plain, and the same on every rank. The state of an optimizer that has not stepped yet can be loaded into.
        """
        model = bare(wrapped)
        return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}

    def load_state(self, wrapped: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` gave and a checkpoint filled.

        Raises:
            TrainError: the optimizer's parameters were grouped in another way.
            RuntimeError: the model has other parameters (torch's own).

        """
        model = bare(wrapped)
        model.load_state_dict(state["model"])
        load_optimizer_state(model, optimizer, state["optimizer"])

    def full_model_state(self, wrapped: nn.Module) -> dict[str, Tensor]:
        """The bare model's state dict, whole tensors of their own on the CPU, on the main rank; ``{}`` elsewhere."""
        whole = {}
        for name, value in bare(wrapped).state_dict().items():
            one = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor's: collective
            if is_main():
                whole[name] = one.detach().to("cpu", copy=True) if hasattr(one, "detach") else one
        return whole

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules to compile, each by itself: the whole model where nothing is done between its parts."""
        return [model]

    def unused(self, model: nn.Module) -> list[str]:
        """The parameters that want a gradient and got none: to be asked after the first window's backward passes."""
        return [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]

    def refuse_unused(self, model: nn.Module) -> None:  # noqa: B027  # most engines do not wait
        """After the first window's backward passes: see that the gradients are complete.

        Raises:
            TrainError: some parameters got no gradient, and this engine would wait for them.

        """

    def explain(self, error: Exception, model: nn.Module) -> Exception:  # noqa: ARG002  # for those that know more
        """What an error of the engine in a forward or backward pass means, in our words; itself if nothing is known."""
        return error


class Single(Strategy):
    """A world of one: no engine at all, whatever strategy was asked for."""

    name = "single"

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        session: Session,
        precision: Precision,  # noqa: ARG002  # autocast is all there is to it
        *,
        fused: bool = True,
    ) -> tuple[nn.Module, Optimizer]:
        """The model itself, and its optimizer."""
        from instep.train.optimizers import build

        if session.world_size > 1:
            raise TrainError(
                f"{session.world_size} ranks cannot train alone: their models would part.",
                cure="strategy='ddp', 'zero1', 'fsdp' or 'hsdp'",
            )
        return model, build(optimizer, model, fused=fused)
