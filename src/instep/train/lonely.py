"""Collectives of plain torch on one rank alone: an error at once, where they would be a hang."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from instep.errors import StepError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def no_collectives(where: str) -> AbstractContextManager[Any]:
    """Inside, every operation of a process group raises.

    Torch sends its collectives through the dispatcher like any other operator (namespace ``c10d``), also those that
    DDP and FSDP start in a forward pass, so that a dispatch mode sees them all.

    Args:
        where: who runs alone, for the error: "X.on_step_end(), a callback of the main rank,".

    """
    mode: AbstractContextManager[Any] = _mode()(where)
    return mode


@functools.cache
def _mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode  # torch's CommDebugMode is built on it

    class Refuse(TorchDispatchMode):
        def __init__(self, where: str) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.where = where

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                name = func._schema.name.partition("::")[2]  # noqa: SLF001  # an operator has no public name
                raise StepError(
                    f"{self.where}, calls the collective {name}, and the other ranks are not there: it would wait for "
                    "ever.",
                    cure="Let it run on all ranks (ranks = 'all'), or move the collective out of it.",
                )
            return func(*args, **(kwargs or {}))

    return Refuse
