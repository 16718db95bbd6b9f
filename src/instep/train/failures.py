"""An exception on one rank ends all ranks, instead of leaving the others in a wait."""

from __future__ import annotations

import pickle
import traceback
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from instep.comm import gather_objects
from instep.comm.session import together
from instep.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

T = TypeVar("T")


class Caught(Generic[T]):
    """Keeps this rank's first exception until all ranks meet.

    ::

        caught = Caught("evaluate()")
        with caught:
            count = work()  # may raise on some ranks
        counts = caught.exchange(count)  # raises on all ranks then, or on none

    After a failure the blocks that follow still run: ask :attr:`failed` before work that is in vain then.

    Args:
        where: what the ranks do together, for the error: "evaluate()".

    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank has failed."""
        return self.error is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # an interrupt, or an exit: not ours to hold back
        self.error = self.error or error
        return True

    def exchange(self, word: Any = None) -> list[Any]:
        """What every rank has to say, in rank order, unless one has failed. All ranks call it.

        Args:
            word: anything that pickle takes.

        Raises:
            Exception: this rank's own, if it has failed.
            StepError: another rank has failed; its rank, error and line are in the text. (A StepError, for the
                launcher counts it as a consequence, and shows the failed rank's own exception.)

        """
        session = together(self.where)
        if session.world_size == 1:
            if self.error is not None:
                raise self.error
            return [word]
        payload = b""
        with self:
            if not self.failed:
                payload = pickle.dumps(word)
        everyone = gather_objects((payload, None if self.error is None else _told(self.error)))
        if self.error is not None:
            raise self.error
        for rank, (_, told) in enumerate(everyone):
            if told is not None:
                headline, place = told
                raise StepError(
                    f"{self.where} cannot go on: rank {rank} failed with {headline}",
                    evidence=[place],
                    cure=f"Mend what failed on rank {rank}: its traceback is in its own output.",
                )
        return [pickle.loads(other) for other, _ in everyone]  # noqa: S301  # the other ranks run this program, too

    def once(self, rank: int, function: Callable[[], T]) -> T:
        """What the function gives on one rank, on every rank. All ranks call it."""
        value = None
        with self:
            if together(self.where).rank == rank and not self.failed:
                value = function()
        return self.exchange(value)[rank]  # type: ignore[no-any-return]  # that rank's value


def _told(error: Exception) -> tuple[str, str]:
    """(what, where)."""
    line = str(error).partition("\n")[0]
    headline = f"{type(error).__name__}: {line}" if line else type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return headline, f"{frame.filename}:{frame.lineno} in {frame.name}"
