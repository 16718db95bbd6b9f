"""instep: from bare machines to a finished multi-node PyTorch run, with every rank kept in step.

The public names, handed on when they are first used: ``import instep`` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep import data as data, train as train
    from instep.comm import (
        agree as agree,
        barrier as barrier,
        broadcast_object as broadcast_object,
        close as close,
        gather_objects as gather_objects,
        get_logger as get_logger,
        init as init,
        is_main as is_main,
        main_first as main_first,
        main_only as main_only,
        mean as mean,
        rank as rank,
        total as total,
        world_size as world_size,
    )
    from instep.data import shard as shard
    from instep.errors import InstepError as InstepError
    from instep.train import Trainer as Trainer
    from instep.world import World as World, detect as world

__version__ = "0.1.0"

_HOMES = {
    "InstepError": "instep.errors",
    "Trainer": "instep.train",
    "World": "instep.world",
    "shard": "instep.data",
    **dict.fromkeys(
        (
            "agree",
            "barrier",
            "broadcast_object",
            "close",
            "gather_objects",
            "get_logger",
            "init",
            "is_main",
            "main_first",
            "main_only",
            "mean",
            "rank",
            "total",
            "world_size",
        ),
        "instep.comm",
    ),
}

# ``world`` can be called, too: see its first lines. The others have more names than this page.
_PACKAGES = ("world", "data", "train")

__all__ = ["__version__", "data", "train", "world", *sorted(_HOMES)]  # noqa: PLE0604  # ruff cannot see that the keys are strings


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"instep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
