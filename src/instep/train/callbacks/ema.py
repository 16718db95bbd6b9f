"""An exponential moving average of the weights, and evaluation with it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from instep.errors import TrainError
from instep.train.events import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim.swa_utils import AveragedModel

    from instep.train.trainer import Trainer

Buffers = Literal["model", "average"]


class EMA(Callback):
    """Keep an average of the weights, ``average = decay * average + (1 - decay) * weights``, and evaluate with it.

    It is torch's own ``AveragedModel``, on every rank, over the tensors that the rank has: all of them under ddp, its
    parts under fsdp. The average begins with the weights after the first update; before it, evaluation uses the
    weights themselves. During an evaluation the average is in the model, and the weights come back bit by bit.

    Args:
        decay: from 0 (no memory) to 1.
        every: average at each so-many-th step.
        buffers: ``"model"``: evaluate with the model's own buffers (the running statistics of BatchNorm);
            ``"average"``: average them too.

    """

    ranks = "all"

    def __init__(self, decay: float = 0.999, *, every: int = 1, buffers: Buffers = "model") -> None:
        if not 0 <= decay <= 1:
            raise TrainError(f"EMA cannot have decay={decay!r}.", cure="A number from 0 to 1: decay=0.999")
        if buffers not in get_args(Buffers):
            raise TrainError(f"EMA does not know buffers={buffers!r}.", cure="'model' or 'average'")
        self.decay = decay
        self.every = every
        self.buffers = buffers
        self._average: AveragedModel | None = None
        self._inside = False  # the average is in the model, and the weights are where the average was
        self._loaded: dict[str, Any] | None = None
        self._model: nn.Module | None = None
        self._parted: list[Any] = []  # the modules that fsdp has divided among the ranks

    def on_fit_start(self, trainer: Trainer) -> None:
        """Make room for the average, or go on with the one that was saved."""
        if self._inside and self._model is not None:  # an evaluation outside of fit() had failed
            self._swap(self._model)
        if self._average is None or self._model is not trainer.model:
            self._make(trainer.model)
        if self._loaded is not None:
            self._take(trainer.model, self._loaded)
            self._loaded = None

    def on_step_end(self, trainer: Trainer) -> None:
        """Average."""
        if self._average is not None:
            # AveragedModel wants no more of a model than its tensors.
            self._average.update_parameters(cast("nn.Module", _Tensors(self._live(trainer.model))))

    def on_evaluate_start(self, trainer: Trainer) -> None:
        """Put the average into the model."""
        if not self._inside:
            self._swap(trainer.model)

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:  # noqa: ARG002
        """Put the weights back."""
        if self._inside:
            self._swap(trainer.model)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """Put the weights back, if the evaluation failed."""
        if self._inside:
            self._swap(trainer.model)

    @contextmanager
    def averaged(self, trainer: Trainer) -> Iterator[None]:
        """A block in which the model has the averaged weights, to predict or to export with them.

        All ranks go through it together under fsdp, as through any use of the model.
        """
        if self._inside:
            yield
            return
        self._swap(trainer.model)
        try:
            yield
        finally:
            if self._inside:
                self._swap(trainer.model)

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the average by the parameters' names: whole tensors on the CPU under fsdp.

        All ranks have to call it together under fsdp.
        """
        if self._average is None or self._model is None:
            return self._loaded or {}
        whole = {
            name: _whole(mine, like)
            for (name, like), mine in zip(self._named(self._model), self._average.module.buffers(), strict=True)
        }
        return {"updates": int(self._average.n_averaged), "weights": whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until on_fit_start, where the model is."""
        self._loaded = state

    def _make(self, model: nn.Module) -> None:
        from torch import nn
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        self._model = model
        self._parted = [one for one in model.modules() if hasattr(one, "reshard") and hasattr(one, "unshard")]
        # Not over the model itself: fsdp's modules cannot be copied, nor can a model that holds what has no copy.
        room = nn.Module()
        for number, tensor in enumerate(self._live(model)):
            room.register_buffer(str(number), tensor)
        self._average = AveragedModel(room, multi_avg_fn=get_ema_multi_avg_fn(self.decay), use_buffers=True)
        self._inside = False

    def _named(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        for module in self._parted:  # between a forward pass and the next, fsdp may show whole tensors, gathered before
            module.reshard()
        named: list[tuple[str, Tensor]] = list(model.named_parameters())
        return named + list(model.named_buffers()) if self.buffers == "average" else named

    def _live(self, model: nn.Module) -> list[Tensor]:
        """The tensors of the model that this rank has, without a copy."""
        return [_local(tensor) for _, tensor in self._named(model)]

    def _swap(self, model: nn.Module) -> None:
        if self._average is None or not self._average.n_averaged:
            return
        for mine, theirs in zip(self._average.module.buffers(), self._live(model), strict=True):
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)
        self._inside = not self._inside

    def _take(self, model: nn.Module, state: dict[str, Any]) -> None:
        assert self._average is not None  # made just before
        named = self._named(model)
        weights = state["weights"]
        if (expected := [name for name, _ in named]) != list(weights):
            raise TrainError(
                "The average in the checkpoint is of another model, or was kept with another choice of buffers.",
                evidence=_difference(expected, list(weights)),
                cure="EMA(buffers=...) as before, or resume without EMA's state.",
            )
        for (name, like), mine in zip(named, self._average.module.buffers(), strict=True):
            if weights[name].shape != like.shape:
                raise TrainError(
                    f"The average of {name} in the checkpoint has another shape.",
                    evidence=[f"checkpoint: {list(weights[name].shape)}", f"model: {list(like.shape)}"],
                )
            mine.copy_(_part(weights[name], like))
        self._average.n_averaged.fill_(int(state["updates"]))


class _Tensors:
    """What AveragedModel asks of a model."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def parameters(self) -> Iterator[Tensor]:
        return iter(())

    def buffers(self) -> Iterator[Tensor]:
        return iter(self._tensors)


def _local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has, or the tensor: the same memory, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(mine: Tensor, like: Any) -> Tensor:
    """The whole tensor of which `mine` is this rank's part, if `like` is a DTensor. A collective then."""
    if not hasattr(like, "to_local"):
        return mine
    from torch.distributed.tensor import DTensor

    parted = DTensor.from_local(mine, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return parted.full_tensor().cpu()


def _part(whole: Tensor, like: Any) -> Tensor:
    """The part of `whole` that this rank has, if `like` is a DTensor. A collective then."""
    if not hasattr(like, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()


def _difference(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    lacking = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in expected]
    lines = [f"not in the checkpoint: {', '.join(lacking[:5])}"] if lacking else []
    lines += [f"not in the model: {', '.join(foreign[:5])}"] if foreign else []
    return lines or ["the same names in another order"]
