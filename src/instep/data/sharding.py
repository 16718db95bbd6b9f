"""``instep.shard``: each rank's exact part of the data, in an order that seed and epoch alone decide."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from instep.data import checks
from instep.data.checks import LengthUnknownError
from instep.data.order import EpochSeeded, RankSampler, WorkerStart, tell
from instep.data.partition import Partition
from instep.data.randomness import Randomness, derive
from instep.data.streams import OwnStream, SharedStream
from instep.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("instep.data")

_TAKEN_OVER = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def shard(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    already_sharded: bool = False,
    **loader_options: Any,
) -> ShardedLoader:
    """Give this rank its part of the data, exactly: over an epoch each sample is drawn once, by one rank.

    **The partition.** `batch_size` is per rank; the global batch is G = batch_size x world_size samples. Global
    batch k is ``order[k*G:(k+1)*G]``, and rank r takes every world_size-th sample of it, from its r-th on. So what
    all ranks together see at step k is the same set for every world size at the same G. Nothing is padded, nothing
    comes twice, nothing is left out, unless `drop_last`, which leaves out a last *global* batch that is not full.
    With fewer samples than ranks some ranks get none, and their loop ends at once.

    **The order** is a function of `seed` and epoch: not of the rank, the world size, the number of workers, the
    global random states, or what was drawn before. That holds for every sampler: those of torch, and your own that
    draw from the global generators of torch, numpy or random or from generators that they keep as attributes.
    All of them are seeded for the draw and have their own states back after it. Samplers without a length, also
    endless ones, are drawn lazily. With a `batch_sampler` rank r takes its batches r, r + world_size, ...

    **Epochs.** Each ``iter()`` is one epoch and advances :attr:`ShardedLoader.epoch`, which can be set, for a
    restart. ``set_epoch`` of your dataset or sampler is called for you.

    **Streams.** Of an IterableDataset rank r keeps the samples i with ``i % world_size == r``; worker w of W makes
    the global batches w, w + W, ... So ranks and workers are disjoint and complete whatever `num_workers`, but
    every worker of every rank reads the whole stream. Its ``__iter__`` runs with random states that are the same
    on all of them, and sees no workers (a stream that divides itself among its workers is read whole). One that
    divides itself among the ranks needs `already_sharded`.

    **Random augmentation** differs by rank, worker and epoch and is repeatable from (seed, epoch, rank): torch,
    numpy and random are seeded in the workers, and without workers batches are fetched under states of their own,
    so that the global states of your program stay as they are. (A generator that the *dataset* keeps as an
    attribute is its own affair.)

    Args:
        data: a dataset with ``len`` and ``[i]`` (lists and tensors too), an IterableDataset, or a ready DataLoader,
            whose batch size, order, workers, collate_fn and so on are taken over. Its ``generator`` is not used.
        batch_size: samples per rank and step; with a DataLoader leave it out.
        shuffle: a new random order each epoch. None: False for a dataset; a DataLoader's sampler decides.
        seed: what orders and augmentation are derived from; the same on all ranks.
        drop_last: leave out a last global batch that is not full. None: False, or what the DataLoader says.
        rank: this process among the ranks; None: ``instep.rank()``.
        world_size: number of ranks; None: ``instep.world_size()``.
        already_sharded: every rank passes data of its own; only seeds and epochs are looked after.
        loader_options: anything else that ``DataLoader`` takes: num_workers, collate_fn, sampler, pin_memory, ...

    Returns:
        A loader to iterate over, once per epoch. It makes no collective call, now or later.

    Raises:
        DataError: the data cannot be divided exactly as asked; the text says what to write instead.

    """
    if isinstance(data, ShardedLoader):
        raise DataError(
            "The loader is sharded already.",
            evidence=[f"rank {data.rank} of {data.world_size} of {type(data.dataset).__name__}"],
            cure="call instep.shard once, on the dataset or on the plain DataLoader",
        )
    here = checks.place(*_who(rank, world_size))
    seed = checks.whole_number("seed", seed)
    if batch_size is not None:
        batch_size = checks.whole_number("batch_size", batch_size, 1)
    if isinstance(data, DataLoader):
        checks.loader(data, batch_size, shuffle, loader_options)
        loader = data
    else:
        checks.dataset(data, batch_size, loader_options)
        loader = _plain_loader(data, batch_size, shuffle, loader_options)
    return ShardedLoader(loader, here, seed=seed, drop_last=drop_last, already_sharded=already_sharded)


class ShardedLoader:
    """One rank's batches of a DataLoader; made by :func:`shard`.

    Attributes:
        epoch: the epoch that the next ``iter()`` reads; set it to go back, or on after a restart.
        dataset: the user's dataset.
        batch_size: samples per rank and step; None where the user's batch sampler decides, or nothing is batched.
        rank: this rank.
        world_size: number of ranks.
        seed: what the orders are derived from.

    """

    def __init__(
        self,
        loader: DataLoader[Any],
        here: tuple[int, int],
        *,
        seed: int,
        drop_last: bool | None = None,
        already_sharded: bool = False,
    ) -> None:
        self.epoch = 0
        self.dataset: Any = loader.dataset
        self.batch_size = loader.batch_size
        self.seed = seed
        self.rank, self.world_size = here
        self._shared = not already_sharded
        # With data of its own, a rank is a world of one as far as the order goes.
        self._share = self.rank if self._shared else 0
        self._own_batches = loader.batch_size is None and loader.batch_sampler is not None
        self._partition = Partition(
            self.world_size if self._shared else 1,
            loader.batch_size or 1,
            loader.drop_last if drop_last is None else bool(drop_last),
        )
        self._generator = torch.Generator()
        self._source: RankSampler | OwnStream
        if isinstance(loader.dataset, IterableDataset):
            self._units = checks.length(loader.dataset)
            self._source = self._stream(loader)
            self._loader = self._stream_loader(loader, self._source)
        else:
            order = loader.batch_sampler if self._own_batches else loader.sampler
            self._units = checks.length(order)
            self._source = self._sampler(order, loader)
            self._loader = self._map_loader(loader, self._source)
        if self._units == 0:
            checks.sized(loader.dataset, 0)
        self._warn(sequential=_sequential(loader))

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._source.epoch = epoch
        seed = derive("fetch", self.seed, epoch, self.rank)
        self._generator.manual_seed(seed)  # DataLoader draws the seeds of its workers from it
        tell(epoch, self.dataset)
        if self._loader.num_workers > 0:
            return iter(self._loader)
        return _fetched(self._loader, Randomness(seed))

    def __len__(self) -> int:
        """Number of batches that this rank gets in an epoch.

        Raises:
            LengthUnknownError: the stream or the sampler does not say.

        """
        return self._partition.batches(self._known(), self._share)

    @property
    def steps(self) -> int:
        """Number of global batches in an epoch: the most batches that any rank gets.

        Raises:
            LengthUnknownError: the stream or the sampler does not say.

        """
        return self._partition.steps(self._known(of_all=True))

    def global_batch_size(self, step: int) -> int:
        """Samples in the global batch at `step` of an epoch, all ranks together: the exact weight of its loss.

        Raises:
            DataError: there is no such step.
            LengthUnknownError: the stream or the sampler does not say.

        """
        units = self._known(of_all=True, samples=True)
        if not 0 <= step < self.steps:
            raise DataError(
                "An epoch has no such step.",
                evidence=[f"step={step}, steps={self.steps}"],
                cure="steps count from 0 in each epoch: for step, batch in enumerate(loader)",
            )
        return self._partition.size(units, step)

    def counts(self) -> tuple[int, ...]:
        """Samples that each rank gets in an epoch, by rank.

        Raises:
            LengthUnknownError: the stream or the sampler does not say.

        """
        units = self._known(of_all=True, samples=True)
        return tuple(self._partition.count(units, rank) for rank in range(self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` read `epoch`: the same as setting :attr:`epoch`."""
        self.epoch = epoch

    def __repr__(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return f"ShardedLoader({type(self.dataset).__name__}, rank {self.rank} of {self.world_size}{size})"

    def _known(self, *, of_all: bool = False, samples: bool = False) -> int:
        units = self._units
        if units is None:
            reason = f"{type(self.dataset).__name__} and its sampler have no length"
        elif of_all and not self._shared:
            reason = "already_sharded=True: the other ranks' data is not known here"
        elif samples and self._own_batches:
            reason = "the batch sampler alone knows how many samples a batch has"
        else:
            return units
        raise LengthUnknownError(
            "How much data there is cannot be said beforehand.",
            evidence=[reason],
            cure="count while reading: instep.total(len(batch))",
        )

    def _sampler(self, order: Any, loader: DataLoader[Any]) -> RankSampler:
        if self._shared:
            checks.sampler(order)
        if self._units is None and isinstance(loader.sampler, SequentialSampler):
            checks.sized(loader.dataset, None)
        return RankSampler(
            order,
            self._partition,
            rank=self._share,
            seed=self.seed,
            whole=self.batch_size is None,
            labelled=loader.persistent_workers,
        )

    def _stream(self, loader: DataLoader[Any]) -> OwnStream:
        about: dict[str, Any] = {"seed": self.seed, "rank": self.rank, "persistent": loader.persistent_workers}
        if self._shared:
            return SharedStream(self.dataset, self._partition, **about)
        return OwnStream(self.dataset, **about)

    def _map_loader(self, loader: DataLoader[Any], order: RankSampler) -> DataLoader[Any]:
        dataset: Any = loader.dataset
        start = loader.worker_init_fn
        if loader.persistent_workers:
            dataset = EpochSeeded(dataset, self.seed, self.rank)
            start = start and WorkerStart(start)
        where: dict[str, Any] = {"batch_sampler": order}
        if self.batch_size is None and not self._own_batches:
            where = {"batch_size": None, "sampler": order}
        return DataLoader(dataset, worker_init_fn=start, generator=self._generator, **where, **_options_of(loader))

    def _stream_loader(self, loader: DataLoader[Any], stream: OwnStream) -> DataLoader[Any]:
        start = loader.worker_init_fn
        return DataLoader(
            stream,
            batch_size=self.batch_size,
            # A shared stream has left out what is to be left out: the last *global* batch.
            drop_last=self._partition.drop_last and not self._shared,
            worker_init_fn=start if self._shared else start and WorkerStart(start),
            generator=self._generator,
            **_options_of(loader),
        )

    def _warn(self, *, sequential: bool) -> None:
        """Say once, on the main rank, what would surprise: a loop that some ranks leave early, or an empty one."""
        if self._units is None or not self._shared or self.rank != 0:
            return
        if self.steps == 0:
            _log.warning("drop_last leaves no step: %d samples, global batch %d", self._units, self._partition.block)
        idle = self._partition.idle_ranks(self._units)
        if idle and not sequential:
            _log.warning(
                "the last global batch of each epoch has no sample for %d of %d ranks, which then leave the loop one "
                "step before the others: in training, say drop_last=True (%d %s, %d per global batch)",
                idle,
                self.world_size,
                self._units,
                "batches" if self._own_batches else "samples",
                self._partition.block,
            )


def _who(rank: int | None, world_size: int | None) -> tuple[int, int]:
    from instep import comm

    return comm.rank() if rank is None else rank, comm.world_size() if world_size is None else world_size


def _plain_loader(data: Any, batch_size: int | None, shuffle: bool | None, options: dict[str, Any]) -> DataLoader[Any]:
    """The DataLoader that one process would use."""
    if isinstance(data, IterableDataset):
        checks.stream(data, shuffle)
    if batch_size is not None:
        options = {"batch_size": batch_size, **options}
    try:
        return DataLoader(data, shuffle=shuffle, **options)
    except (TypeError, ValueError) as error:
        raise DataError(
            "DataLoader does not take these options.",
            evidence=[str(error), *(f"{name}={value!r:.60}" for name, value in options.items())],
            cure="https://docs.pytorch.org/docs/stable/data.html lists what it takes",
        ) from error


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    options = {name: getattr(loader, name) for name in _TAKEN_OVER}
    if loader.pin_memory_device:  # deprecated: naming it warns
        options["pin_memory_device"] = loader.pin_memory_device
    return options


def _sequential(loader: DataLoader[Any]) -> bool:
    order: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        order = getattr(loader.batch_sampler, "sampler", order)
    return isinstance(loader.dataset, IterableDataset) or isinstance(order, SequentialSampler)


def _fetched(loader: DataLoader[Any], randomness: Randomness) -> Iterator[Any]:
    """The batches, made in this process; it draws its random numbers from `randomness`, and the program's stay."""
    with randomness:
        batches = iter(loader)
    return _under(randomness, batches)


def _under(randomness: Randomness, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with randomness:
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
