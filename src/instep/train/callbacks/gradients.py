"""How large the gradients are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.train.events import Callback

if TYPE_CHECKING:
    from torch import nn

    from instep.train.trainer import Trainer


class GradientStats(Callback):
    """Add the 2-norm of the gradients to the reports: ``grad_norm``, and ``grad_norm/LAYER`` for each layer.

    They are the norms of the whole gradients, before clipping, also where a rank holds only a part of them (fsdp).
    A layer is a module with parameters of its own. The norms are waited for, which is why it is not done each step.

    Args:
        every: at each so-many-th step. A report shows the last one before it.
        layers: also for each layer.

    """

    ranks = "all"

    def __init__(self, *, every: int = 50, layers: bool = True) -> None:
        self.every = every
        self._layers = layers

    def on_gradients(self, trainer: Trainer) -> None:
        """Take the norms."""
        norm = trainer.strategy.norm
        values = {"grad_norm": norm(list(trainer.model.parameters()))}
        if self._layers:
            values |= {f"grad_norm/{name}": norm(own) for name, own in _layers(trainer.model).items()}
        trainer.log({name: float(value) for name, value in values.items()})


def _layers(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of each module's own that are trained, by the module's name."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0] or "model", []).append(parameter)
    return layers
