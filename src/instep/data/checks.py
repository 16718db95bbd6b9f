"""What cannot be divided exactly is refused here, in words that say what to write instead."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from instep.data.order import parts
from instep.errors import DataError


class LengthUnknownError(DataError, TypeError):
    """Nobody can say how many samples there are without reading them.

    Also a TypeError: that is what Python wants of ``len()``, so that ``list(loader)`` works all the same.
    """


def length(data: object) -> int | None:
    """How many there are, None where the object cannot say."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


def whole_number(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int.

    Raises:
        DataError: it is no integer, or below `least`.

    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise DataError(
            f"{name} has to be {wanted}.", evidence=[f"{name}={value!r}"], cure=f"give {name} a whole number"
        )
    return number


def place(rank: object, world_size: object) -> tuple[int, int]:
    """Rank and world size as ints.

    Raises:
        DataError: they are no integers, or the rank is outside the world.

    """
    size = whole_number("world_size", world_size, 1)
    number = whole_number("rank", rank, 0)
    if number >= size:
        raise DataError(
            "The rank lies outside the world.",
            evidence=[f"rank={number}, world_size={size}"],
            cure=f"ranks count from 0: the last one here is {size - 1}",
        )
    return number, size


def global_batch(value: object, batch_size: int | None, data: object, world_size: int) -> int:
    """The global batch as an int.

    Raises:
        DataError: it is no integer, leaves ranks without a sample, or the batch size is said elsewhere too.

    """
    size = whole_number("global_batch", value, 1)
    if batch_size is not None:
        raise DataError(
            "The batch is said twice, per rank and for all ranks.",
            evidence=[f"batch_size={batch_size}, global_batch={size}"],
            cure="give one of them: global_batch is batch_size x world_size",
        )
    if isinstance(data, DataLoader):
        raise DataError(
            "A DataLoader has a batch size already, per rank.",
            evidence=[f"global_batch={size}, the loader's batch_size is {data.batch_size!r}"],
            cure="pass its dataset: instep.shard(loader.dataset, global_batch=..., collate_fn=...)",
        )
    if size < world_size:
        raise DataError(
            "The global batch has fewer samples than there are ranks: some would never get one.",
            evidence=[f"global_batch={size}, world_size={world_size}"],
            cure=f"say global_batch={world_size} or more, or start fewer ranks",
        )
    return size


def position(value: object, units: int | None, multiple: int = 1) -> int:
    """A position in an epoch as an int.

    Raises:
        DataError: it is no integer, negative, beyond `units`, or no multiple of `multiple`.

    """
    number = whole_number("position", value, 0)
    if units is not None and number > units:
        raise DataError(
            "The position lies beyond the end of the epoch.",
            evidence=[f"position={number}, an epoch has {units}"],
            cure="are these the data that the position was counted in?",
        )
    if number % multiple:
        raise DataError(
            "A stream that shards itself can be begun at its batches only.",
            evidence=[f"position={number}, a batch has {multiple}"],
            cure=f"give a multiple of {multiple}",
        )
    return number


def dataset(data: Any, batch_size: object, options: dict[str, Any]) -> None:
    """Refuse what is no dataset, an empty one, and one whose length is needed but unknown.

    Raises:
        DataError: see above.

    """
    if not isinstance(data, IterableDataset) and not hasattr(data, "__getitem__"):
        raise DataError(
            f"This is neither a dataset nor a DataLoader: {type(data).__name__}.",
            evidence=[f"{data!r:.100} has no __getitem__, and is no torch.utils.data.IterableDataset"],
            cure="pass a list, a tensor or a Dataset (len and [i]), an IterableDataset, or a DataLoader of one",
        )
    if batch_size is None and "batch_sampler" not in options:
        raise DataError(
            "How many samples a rank takes per step is missing.",
            evidence=["batch_size=None, and a dataset has none of its own"],
            cure="instep.shard(dataset, batch_size=32)  # per rank: the global batch is 32 x world_size\n"
            "or global_batch=64, for all ranks together",
        )
    own_order = options.get("sampler") is not None or options.get("batch_sampler") is not None
    if not isinstance(data, IterableDataset) and not own_order:
        sized(data, length(data))
    elif length(data) == 0:
        sized(data, 0)


def sized(data: object, samples: int | None) -> int:
    """The number of samples.

    Raises:
        DataError: none, or nobody knows.

    """
    if samples is None:
        raise DataError(
            f"{type(data).__name__} has no length, so its samples cannot be numbered and divided.",
            evidence=[f"len({type(data).__name__}) is not defined"],
            cure="give it a __len__, make it an IterableDataset, or pass sampler=... that yields its indices",
        )
    if samples == 0:
        raise DataError(
            "There are no samples to divide.",
            evidence=[f"len({type(data).__name__}) is 0"],
            cure="look at the path and the filter that the samples come from",
        )
    return samples


def loader(data: DataLoader[Any], batch_size: object, shuffle: bool | None, options: dict[str, Any]) -> None:
    """Refuse arguments that a ready DataLoader has settled already, and loaders that would lose something.

    Raises:
        DataError: see above.

    """
    if type(data).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"{type(data).__name__} reads its data in its own way, which instep cannot divide.",
            evidence=[f"{type(data).__name__} has an __iter__ of its own"],
            cure="pass the dataset: instep.shard(loader.dataset, batch_size=..., collate_fn=...)",
        )
    if options:
        raise DataError(
            "A DataLoader brings its own options.",
            evidence=[f"{name}={value!r:.60}" for name, value in options.items()],
            cure="set them where the DataLoader is made, or pass its dataset instead",
        )
    if batch_size is not None and batch_size != data.batch_size:
        raise DataError(
            "The DataLoader has another batch size.",
            evidence=[f"batch_size={batch_size!r}, the loader's is {data.batch_size!r}"],
            cure="leave batch_size out: the loader's own is taken over, and means samples per rank",
        )
    sampler = type(data.sampler)
    if shuffle is not None and sampler is not (RandomSampler if shuffle else SequentialSampler):
        raise DataError(
            "The DataLoader has an order of its own.",
            evidence=[f"shuffle={shuffle}, the loader's sampler is a {sampler.__name__}"],
            cure=f"leave shuffle out, and say DataLoader(..., shuffle={shuffle}) where the loader is made",
        )


def stream(data: object, shuffle: bool | None) -> None:
    """Refuse to shuffle a stream.

    Raises:
        DataError: `shuffle` is true.

    """
    if shuffle:
        raise DataError(
            "A stream cannot be shuffled from outside.",
            evidence=[f"shuffle=True, and {type(data).__name__} is an IterableDataset"],
            cure="shuffle in its __iter__ (random numbers there depend on seed and epoch and agree on all ranks)",
        )


def sampler(order: object) -> None:
    """Refuse a sampler that divides already, and one that lasts for one epoch only.

    Raises:
        DataError: see above.

    """
    for part in parts(order):
        if hasattr(part, "num_replicas") and hasattr(part, "rank"):
            name = type(part).__name__
            raise DataError(
                f"The loader is sharded already: its sampler is a {name}.",
                evidence=[
                    f"{name}.num_replicas={part.num_replicas}, {name}.rank={part.rank}",
                    f"wrong: instep.shard(DataLoader(data, batch_size=32, sampler={name}(data)))",
                    "right: instep.shard(DataLoader(data, batch_size=32, shuffle=True))",
                ],
                cure=f"leave the {name} out: instep divides exactly, without its padding, "
                "and sets the epoch itself\n(already_sharded=True leaves the loader as it is)",
            )
    if isinstance(order, Iterator):
        raise DataError(
            "The sampler can be read once only: the second epoch would be empty.",
            evidence=[f"sampler={type(order).__name__}, an iterator"],
            cure="pass a list of indices, or a Sampler whose __iter__ begins anew",
        )
