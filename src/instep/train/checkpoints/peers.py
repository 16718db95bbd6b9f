"""The ranks, on a line of their own: a background thread may talk on it while training talks on another."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from instep.comm.leave import let_threads_come_to_rest
from instep.comm.objects import broadcast_object
from instep.comm.session import initialized_dist
from instep.errors import CheckpointError, InstepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from instep.comm.session import Session

T = TypeVar("T")
_WRITE_WITHIN = timedelta(hours=2)  # the others may have much more to write, over a slow network


class Peers:
    """A gloo group of all ranks. Making one is a collective; a process without torch.distributed has and needs none.

    Args:
        session: the world.

    """

    def __init__(self, session: Session) -> None:
        self.rank, self.world_size = session.rank, session.world_size
        self.group: ProcessGroup | None = None
        if initialized_dist() is not None:  # also in a world of one, whose own group may be NCCL's
            import torch.distributed as dist

            self.group = dist.new_group(backend="gloo", timeout=_WRITE_WITHIN)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_main(self, value: T | None) -> T:
        """The main rank's value."""
        values = [value]
        if self.group is not None:
            import torch.distributed as dist

            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[return-value]  # the main rank's

    def close(self) -> None:
        """Give the group up."""
        if self.group is not None:
            import torch.distributed as dist

            group, self.group = self.group, None
            if dist.is_initialized():
                let_threads_come_to_rest()
                dist.destroy_process_group(group)


def main_decides(session: Session, function: Callable[[], T]) -> T:
    """What a function gives on the main rank, on every rank. What it raises there is raised on every rank."""
    answer: tuple[T | None, InstepError | None] = (None, None)
    if session.is_main:
        try:
            answer = (function(), None)
        except InstepError as error:
            answer = (None, error)
        except Exception as error:  # noqa: BLE001  # the others wait for an answer, whatever happened here
            evidence = [f"{type(error).__name__}: {error}"]
            answer = (None, CheckpointError("The folder of the checkpoints cannot be used.", evidence=evidence))
    value, failure = broadcast_object(answer)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # the main rank's
