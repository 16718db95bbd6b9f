"""Who am I? The launcher's environment becomes one :class:`World`.

``instep.world()`` is both this package and the function: a package and a function of one name would hide each
other, so the package can be called (see the end of this file).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from instep import errors
from instep.world import arguments, ports
from instep.world.record import FIELDS, Evidence, World
from instep.world.resolve import resolve

__all__ = ["FIELDS", "Evidence", "World", "detect", "joined", "remember", "resolve"]

_joined: World | None = None


def detect(
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
) -> World:
    """Who this process is, from the environment, the script's arguments and what the caller gives.

    The argument that torch.distributed.launch adds to the script's own (``--local-rank=N``) is taken out of
    ``sys.argv``, so that a script that knows nothing of it can parse its arguments afterwards.

    Args:
        init_method: where to meet: ``tcp://HOST:PORT``, ``file:///PATH`` or ``env://``; None: what the launcher says.
        rank: with `world_size`, overrules the environment (``torch.multiprocessing.spawn``).
        world_size: see `rank`.
        local_rank: with `local_world_size` and without `rank`: number of this process among those that one task of
            the launcher has spawned; the world is then tasks x spawned.
        local_world_size: see `local_rank`.

    Raises:
        WorldError: no usable answer, or two that conflict.
        JoinError: `init_method` is no place to meet.

    """
    errors.speak_plainly()
    found = arguments.find(sys.argv, os.environ)
    if found:
        del sys.argv[found[1] : found[2]]
        os.environ.setdefault("LOCAL_RANK", str(found[0]))  # the next call finds it here
    return resolve(
        os.environ,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        init_method=init_method,
        local_rank_argument=found[0] if found else None,
        ephemeral=ports.ephemeral_range(),
    )


def joined() -> World | None:
    """The world that this process has joined by ``instep.init()``, until ``instep.close()``."""
    return _joined


def remember(world: World | None) -> None:
    """Note which world this process has joined, or that it has left: for ``instep.comm`` alone."""
    global _joined  # noqa: PLW0603  # one process is in one world
    _joined = world


class _CallablePackage(ModuleType):
    """``instep.world()``: the world that was joined, else what :func:`detect` finds."""

    def __call__(self) -> World:
        """Who this process is.

        Raises:
            WorldError: no usable answer, or two that conflict.

        """
        return joined() or detect()

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, (__name__,)  # pickle and cloudpickle know plain modules only


sys.modules[__name__].__class__ = _CallablePackage
