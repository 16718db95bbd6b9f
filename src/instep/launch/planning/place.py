"""Where the ranks of one machine stand in the world, and the variables that say so to them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from instep.launch.ranks.signals import ENDING

LOOPBACK = "127.0.0.1"  # where the ranks meet when all of them are on this machine


@dataclass(frozen=True)
class Place:
    """The ranks of one machine.

    Attributes:
        first_rank: the lowest of them; they are consecutive.
        count: how many they are.
        world_size: how many there are on all machines.
        node_rank: number of this machine.
        num_nodes: how many machines there are.
        master_addr: where the ranks meet.

    """

    first_rank: int
    count: int
    world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = LOOPBACK

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        return range(self.first_rank, self.first_rank + self.count)


def alone(world_size: int) -> Place:
    """All ranks on this machine."""
    return Place(0, world_size, world_size)


def rank_environment(
    rank: int, place: Place, port: int | str, job: str, folder: str, *, restart: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """What torchrun sets for a rank, so that a script or library finds what it looks for.

    Args:
        rank: of the world.
        place: the ranks of its machine.
        port: where rank 0 listens.
        job: the job's name in the environment of all its processes.
        folder: the run folder.
        restart: how often the job has been started again.
        max_restarts: how often it may be.

    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - place.first_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.count),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in ENDING),
        "TORCHELASTIC_ERROR_FILE": f"{folder}/log/rank-{rank}.error.json",
    }
