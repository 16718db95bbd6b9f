"""What is done to a model before it is shared: BatchNorm over all ranks, recomputing, compiling, in the right order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from instep.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType

    from instep.comm import Session
    from instep.train.strategies import Strategy


def transform(
    model: nn.Module,
    strategy: Strategy,
    session: Session,
    *,
    sync_batchnorm: bool = False,
    recompute: Sequence[type[nn.Module]] = (),
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's own word
) -> nn.Module:
    """The model, ready for ``strategy.prepare()``. Parameters stay the same objects, and keep their names.

    The order matters: a compiler has to see what is recomputed, and DDP and FSDP have to be outside of what is
    compiled.

    Args:
        model: the bare model, on the session's device.
        strategy: says what is compiled by itself: the whole model, or the blocks of FSDP.
        session: the world.
        sync_batchnorm: see :func:`sync_batchnorms`.
        recompute: see :func:`recompute_in_backward`.
        compile: True, or arguments for ``torch.compile`` such as ``{"mode": "reduce-overhead"}``.

    Returns:
        The same model, unless it was itself a BatchNorm.

    Raises:
        TrainError: the device cannot do it, or the model has nothing of the kind.

    """
    if sync_batchnorm:
        model = sync_batchnorms(model, session)
    if recompute:
        recompute_in_backward(model, recompute)
    if compile is not False:
        options = {} if compile is True else dict(compile)
        for one in strategy.blocks(model) or [model]:
            one.forward = _Compiled(type(one), one.forward, options)
    return model


def sync_batchnorms(model: nn.Module, session: Session) -> nn.Module:
    """Let every BatchNorm take its means over the samples of all ranks.

    Nothing happens in a world of one, and to a model without BatchNorm.

    Raises:
        TrainError: the model is not on a GPU.

    """
    names = [name for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
    if session.world_size == 1 or not names:
        return model
    if session.device.type != "cuda":
        raise TrainError(
            "SyncBatchNorm needs CUDA: torch has none for the CPU.",
            evidence=[f"device: {session.device}", f"BatchNorm in: {', '.join(names[:5])} ({len(names)})"],
            cure="Leave sync_batchnorm out, or use nn.GroupNorm, which needs no other samples.",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def recompute_in_backward(model: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Keep no intermediate values of the modules of these classes, but compute them again in the backward pass.

    ``torch.utils.checkpoint``, put around each module's own forward(): no module is added, so that all names stay.

    Raises:
        TrainError: the model has no module of these classes.

    """
    found = [one for one in model.modules() if isinstance(one, tuple(classes))]
    if not found:
        have = sorted({type(one).__name__ for one in model.modules()})
        raise TrainError(
            f"The model has no {' or '.join(one.__name__ for one in classes)} to recompute.",
            evidence=[f"it has: {', '.join(have)}"],
        )
    for one in found:
        # A bound method inside a partial is copied and pickled along with its module, as a closure would not be.
        one.forward = functools.partial(_recomputed, one.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@functools.cache
def _code(kind: str, code: CodeType) -> CodeType:
    """A copy of the code for this class of modules."""
    return code.replace(co_name=f"{code.co_name}_{kind}")


class _Compiled:
    """A module's forward(), compiled.

    Unlike ``torch.compile(module)`` this makes no module that would change all names. Unlike ``module.compile()`` it
    also compiles torch's own modules (a Sequential), and leaves the hooks of FSDP outside. It is copied and pickled
    along with its module, and then compiled again.
    """

    def __init__(self, kind: type[nn.Module], forward: Callable[..., Any], options: dict[str, Any]) -> None:
        self.kind = kind
        self.forward = forward
        self.options = options

        def run(*args: Any, **kwargs: Any) -> Any:  # a frame of ours: the compiler skips those of torch.nn
            return forward(*args, **kwargs)

        # The compiler keeps what it made, up to a limit, by the code that it saw: one for each class of modules.
        run.__code__ = _code(kind.__qualname__, run.__code__)
        self.compiled = torch.compile(run, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return _Compiled, (self.kind, self.forward, self.options)
