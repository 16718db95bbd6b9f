"""``predict``: the outputs of all samples, in dataset order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from instep.comm.session import together
from instep.errors import TrainError
from instep.train.failures import Caught
from instep.train.keeping import Kept
from instep.train.rounds import Source, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from instep.data.sharding import ShardedLoader

Ranks = Literal["main", "all"]
_WHERE = "predict()"


def predict(
    forward: Callable[[Any], Any],
    loader: ShardedLoader | Iterable[Any],
    *,
    ranks: Ranks = "main",
    move: Callable[[Any], Any] | None = None,
    collective_forward: bool = False,
) -> Any:
    """The outputs of all samples of all ranks, in dataset order.

    ::

        model.eval()
        scores = instep.train.predict(lambda batch: model(batch[0]), instep.shard(data, 64))
        if instep.is_main():
            torch.save(scores, "scores.pt")

    The order is the one in which one process would have read the samples: that of the dataset, or of the sampler. With
    a batch sampler it is that of its batches, with ``already_sharded`` it is rank by rank.

    All ranks call it. The outputs of all samples have to fit in the memory of the main rank's machine (of every
    machine with ``ranks="all"``).

    Args:
        forward: gives the outputs of a batch, in which each sample has one row: a tensor ``[samples, ...]``, a tuple,
            dict or dataclass of them, or a list with one item per sample, of any kind that pickle takes. Called
            without gradients; to put the model in eval mode is up to you.
        loader: what :func:`instep.shard` gives; in a world of one any iterable of batches.
        ranks: who gets the outputs: the main rank, or all.
        move: brings a batch to the device before `forward` gets it.
        collective_forward: as for :func:`instep.train.evaluate`.

    Returns:
        The outputs in the structure of those of a batch, on the CPU: tensors of all samples, and lists for what are
        lists, or tensors whose shape differs between batches. None on ranks that get nothing.

    Raises:
        TrainError: there are no data, the loader is not sharded, or a batch does not have one output per sample.
        StepError: another rank has failed; the text says which, and how. The rank itself raises its own exception.

    """
    together(_WHERE)
    caught = Caught[Any](_WHERE)
    kept: Kept | None = None
    source: Source | tuple[()] = ()
    with caught:
        if ranks not in get_args(Ranks):
            raise TrainError(f"predict() does not know ranks={ranks!r}.", cure="ranks='main' or ranks='all'")
        source = Source(loader, _WHERE)
        kept = Kept(source.dealing, whole=source.whole, strict=True)

    def take(_batch: Any, size: int | None, outputs: Any) -> None:
        if kept is not None:
            kept.add({"outputs": outputs}, size)

    read(source, forward, take, move=move, collective_forward=collective_forward, caught=caught)
    words = caught.exchange(kept.word() if kept else None)
    assert kept is not None  # or this rank has failed, and exchange() raised
    if not any(word.rows for word in words):
        raise TrainError("There is nothing to predict: no rank got a batch.", cure="Look at the length of the dataset.")
    gathered = kept.gather(words, to=None if ranks == "all" else 0, caught=caught)
    return None if gathered is None else gathered["outputs"]
