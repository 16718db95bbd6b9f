"""Forward passes over all batches of all ranks: each rank for itself, or all in step."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from instep.comm import agree
from instep.comm.session import together
from instep.data.checks import LengthUnknownError
from instep.data.sharding import ShardedLoader
from instep.errors import TrainError
from instep.train.batches import map_leaves
from instep.train.gathering import Dealing
from instep.train.trees import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instep.train.failures import Caught

_NO_MORE = object()
_DONE, _MORE, _FAILED = 0, 1, 2


class Source:
    """The batches that this rank gets of a loader, each with the number of samples that it should have.

    Args:
        data: a sharded loader, or any iterable of batches in a world of one.
        where: for errors: "evaluate()".

    Attributes:
        dealing: how the samples (or, where `whole`, the batches) were dealt out to the ranks.
        whole: the loader deals out ready batches, so that nothing is known of single samples.

    Raises:
        TrainError: there are no data, or they are not sharded though there are other ranks.

    """

    def __init__(self, data: Any, where: str) -> None:
        world_size = together(where).world_size
        self.data = data
        self.where = where
        if isinstance(data, ShardedLoader):
            self.dealing = Dealing(data.world_size, data.block, data.shared)
            self.whole = data.batch_size is None
            if data.world_size != world_size:
                raise TrainError(
                    f"{where} needs the loader of this world.",
                    evidence=[f"the loader's world_size: {data.world_size}", f"ranks: {world_size}"],
                    cure="instep.shard(data, batch_size=...) without rank and world_size",
                )
            return
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
            raise TrainError(
                f"{where} needs data.", evidence=[f"loader={data!r:.80}"], cure="instep.shard(data, batch_size=...)"
            )
        if world_size > 1:
            raise TrainError(
                f"{where} would see every sample {world_size} times: this loader is not sharded.",
                evidence=[f"{type(data).__name__}, and {world_size} ranks"],
                cure="instep.shard(loader)  (with already_sharded=True if each rank has data of its own)",
            )
        self.dealing = Dealing(1, 1)
        self.whole = True

    def __iter__(self) -> Iterator[tuple[Any, int | None]]:
        """(batch, number of samples in it; None where nothing tells)."""
        known = self._known()
        for index, batch in enumerate(self._batches()):
            expected = None
            if known is not None:
                per_rank, mine = known
                expected = max(0, min(per_rank, mine - index * per_rank))
            yield batch, size_of(batch, expected)

    def _batches(self) -> Iterator[Any]:
        if not isinstance(self.data, ShardedLoader):
            return iter(self.data)
        # Every evaluation sees the same samples, all of an epoch: the loader's, which stays what it is.
        epoch = self.data.epoch
        self.data.seek(epoch)
        try:
            return iter(self.data)
        finally:
            self.data.epoch = epoch

    def _known(self) -> tuple[int, int] | None:
        """(samples of a full batch, samples of all batches), of this rank."""
        if self.whole:
            return None
        try:
            mine = self.data.counts()[self.data.rank]
        except LengthUnknownError:
            return None
        if not self.dealing.shared:
            return self.data.batch_size, mine
        return len(range(self.data.rank, self.dealing.block, self.dealing.world_size)), mine


def read(
    source: Iterable[tuple[Any, int | None]],
    forward: Callable[[Any], Any],
    take: Callable[[Any, int | None, Any], None],
    *,
    move: Callable[[Any], Any] | None,
    collective_forward: bool,
    caught: Caught[Any],
) -> None:
    """Take a forward pass over each batch, and hand on what it gives.

    Args:
        source: this rank's batches and their sizes, a :class:`Source`.
        forward: gives the outputs of a batch.
        take: gets each batch, its number of samples, and what `forward` gave.
        move: brings a batch to the device.
        collective_forward: a forward pass talks to the other ranks, so that all take the same number of them.
        caught: keeps this rank's failure, or all ranks raise here.

    """
    batches: Iterator[Any] = iter(())
    with caught:
        batches = iter(source)
    with torch.no_grad():
        if collective_forward and together(caught.where).world_size > 1:
            _in_step(batches, forward, take, move or _as_it_is, caught)
            return
        with caught:
            for batch, size in batches:
                moved = move(batch) if move else batch
                take(moved, size, forward(moved))


def _in_step(
    batches: Iterator[Any],
    forward: Callable[[Any], Any],
    take: Callable[[Any, int | None, Any], None],
    move: Callable[[Any], Any],
    caught: Caught[Any],
) -> None:
    """The same number of forward passes on all ranks: one without a batch repeats its last one, for nothing."""

    def following() -> Any:  # (batch, its size), or _NO_MORE
        with caught:
            pair: Any = next(batches, _NO_MORE)
            return pair if pair is _NO_MORE else (move(pair[0]), pair[1])
        return _NO_MORE

    pair = following()
    spare = _lend(pair, move, caught)
    while agree(_FAILED if caught.failed else _DONE if pair is _NO_MORE else _MORE, how="max") == _MORE:
        if pair is _NO_MORE:
            forward(spare)
            continue
        spare, size = pair
        # What this raises is not held back: the other ranks are in the midst of it, and cannot be told.
        result = forward(spare)
        with caught:
            take(spare, size, result)
        if not caught.failed:
            pair = following()
    caught.exchange()


def _lend(pair: Any, move: Callable[[Any], Any], caught: Caught[Any]) -> Any:
    """A batch for the ranks that have none at all, from the first one that has."""
    has = caught.exchange(pair is not _NO_MORE)
    if all(has) or not any(has):
        return None
    payload = None
    with caught:
        if together(caught.where).rank == has.index(True):
            batch = map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, pair[0])
            payload = pickle.dumps(batch)
    lent = caught.exchange(payload)[has.index(True)]
    return move(pickle.loads(lent)) if pair is _NO_MORE else None  # noqa: S301  # from a rank of this program


def _as_it_is(batch: Any) -> Any:
    return batch
