"""The world that this process has joined, for all pieces of ``instep.comm``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instep.errors import StepError
from instep.world import World, detect, remember

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch.distributed import ProcessGroup, Store
    from typing_extensions import Self


@dataclass
class Session:
    """A world that was joined. As a context manager it leaves in the end.

    Attributes:
        world: who this process is; every field is known once the ranks have met.
        device: the device of this rank.
        backend: torch's name for what carries the collectives, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        timeout: how long a rank waits for the others, in seconds.
        store: the key-value store of the job, None in a world of one.
        hosts: the host name of each rank, in rank order.
        group: a group whose collectives carry CPU tensors, None for torch's default group.
        leaves_last: this process holds the store for the others, or has to remove its file.
        turns: how often each shared place was passed, by its name.
        gave_up: the places at which this rank waited in vain.

    """

    world: World
    device: torch.device
    backend: str
    timeout: float
    store: Store | None = None
    hosts: tuple[str, ...] = ()
    group: ProcessGroup | None = None
    leaves_last: bool = False
    turns: dict[str, int] = field(default_factory=dict, repr=False)
    gave_up: list[str] = field(default_factory=list, repr=False)

    def turn(self, name: str) -> int:
        """How many times this rank has come to the place of that name, now included: the same on all ranks."""
        self.turns[name] = self.turns.get(name, 0) + 1
        return self.turns[name]

    @property
    def rank(self) -> int:
        """Number of this process in the world."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the world."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.world.local_rank or 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.world.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from instep.comm import guarding
        from instep.comm.leave import close

        if error is not None:
            guarding.leave(error)
        # After an error nobody waits for anybody: the others may be in a collective that this rank will not enter.
        close(wait=kind is None)


_session: Session | None = None


def set_session(session: Session | None) -> None:
    """Note which world this process is in: for init() and close() alone."""
    global _session  # noqa: PLW0603  # one process is in one world
    _session = session
    remember(session.world if session else None)


def get_session() -> Session | None:
    """The world joined by init(), None before and after."""
    return _session


def rank() -> int:
    """Number of this process in the world: 0 when alone.

    Raises:
        WorldError: the environment does not say.

    """
    return _identity()[0]


def world_size() -> int:
    """Number of processes in the world: 1 when alone.

    Raises:
        WorldError: the environment does not say.

    """
    return _identity()[1]


def is_main() -> bool:
    """Whether this is rank 0 of the world.

    Raises:
        WorldError: the environment does not say.

    """
    return rank() == 0


def _identity() -> tuple[int, int]:
    if _session is not None:
        return _session.rank, _session.world_size
    dist = initialized_dist()
    if dist is not None:
        return dist.get_rank(), dist.get_world_size()
    world = detect()
    return world.rank, world.world_size


def initialized_dist() -> Any:
    """The module torch.distributed if the process is in a group of it, else None. Imports nothing."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def together(piece: str) -> Session:
    """The session in which all ranks now do `piece` together.

    Raises:
        StepError: other ranks exist but were not joined, or this rank is where only it may be.

    """
    from instep.comm.order import refuse_if_alone

    refuse_if_alone(piece)
    return current(piece)


def current(piece: str) -> Session:
    """The session of init(), or one over torch's default group if the user made that, or a world of one.

    Raises:
        StepError: `piece` needs the other ranks, and they were not joined.

    """
    if _session is not None:
        return _session
    dist = initialized_dist()
    if dist is not None:
        return _over_default_group(dist)
    world = detect()
    if world.world_size > 1:
        raise StepError(
            f"{piece} needs all {world.world_size} ranks, but this one (rank {world.rank}) has not joined them.",
            evidence=[f"{world.launcher}: {world.why('rank')}"],
            cure="Join first:\n    with instep.init():\n        ...",
        )
    import torch

    return Session(world, torch.device("cpu"), "", 0.0)


_default_groups: dict[int, Session] = {}


def _over_default_group(dist: Any) -> Session:
    """A session over the group that the user made, made once for each: with a gloo group beside it if need be."""
    import torch

    default = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # torch has no public name for it
    found = _default_groups.get(id(default))
    if found is not None:
        return found
    world = detect(rank=dist.get_rank(), world_size=dist.get_world_size(), init_method="tcp://0.0.0.0:1")
    backend = str(dist.get_backend_config(default))
    # All ranks come here in their first shared piece, so making a group is in step.
    group = None if "gloo" in backend else dist.new_group(backend="gloo")
    store = dist.PrefixStore("instep/own", dist.distributed_c10d._get_default_store())  # noqa: SLF001  # as above
    session = Session(world, torch.device("cpu"), backend, 600.0, store, group=group)
    _default_groups.clear()
    _default_groups[id(default)] = session
    return session
