"""``instep.shard``: each rank's exact part of the data, in an order that seed and epoch alone decide."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory

from instep.data import checks
from instep.data.checks import LengthUnknownError
from instep.data.fetching import Seeded, WorkerStart, batches_under, fetched
from instep.data.order import RankSampler, tell
from instep.data.partition import Partition
from instep.data.randomness import Kept, Randomness, derive
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
    global_batch: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    already_sharded: bool = False,
    **loader_options: Any,
) -> ShardedLoader:
    """Give this rank its part of the data, exactly: over an epoch each sample is drawn once, by one rank.

    **The partition.** The global batch is G samples: `global_batch`, or batch_size x world_size. Global batch k is
    ``order[k*G:(k+1)*G]``, and rank r takes every world_size-th sample of it, from its r-th on. So what all ranks
    together see at step k is the same set for every world size at the same G, and G need not be a multiple of it:
    16 over 3 ranks are 6, 5 and 5. Nothing is padded, nothing comes twice, nothing is left out, unless `drop_last`,
    which leaves out a last *global* batch that is not full. With fewer samples than ranks some ranks get none, and
    their loop ends at once.

    **The order** is a function of `seed` and epoch: not of the rank, the world size, the number of workers, the
    global random states, or what was drawn before. That holds for every sampler: those of torch, and your own that
    draw from the global generators of torch, numpy or random or from generators that they keep as attributes.
    All of them are seeded for the draw and have their own states back after it. Samplers without a length, also
    endless ones, are drawn lazily. With a `batch_sampler` rank r takes its batches r, r + world_size, ...

    **Epochs.** Each ``iter()`` is one epoch and advances :attr:`ShardedLoader.epoch`, which can be set, for a
    restart. ``set_epoch`` of your dataset or sampler is called for you. :meth:`ShardedLoader.seek` begins inside an
    epoch, without fetching what was seen before.

    **Streams.** An IterableDataset is dealt out in the same way: in each global batch, rank r keeps every
    world_size-th sample from the r-th on; worker w of W makes the global batches w, w + W, ... So ranks and workers
    are disjoint and complete whatever `num_workers`, but every worker of every rank reads the whole stream. Its
    ``__iter__`` runs with random states that are the same on all of them, and sees no workers (a stream that divides
    itself among its workers is read whole). One that divides itself among the ranks needs `already_sharded`.

    **Random augmentation.** The random numbers of a batch are a function of seed, epoch, its position in the epoch
    and the rank, and of nothing else: torch, numpy and random are seeded before each batch is fetched, in a worker
    or in this process. So they differ by rank, batch and epoch, and are the same with any `num_workers` and after
    any restart; ``collate_fn`` runs under the same seed, and the states of your program stay as they are. (A
    generator that the *dataset* keeps as an attribute is its own affair. What a shared stream draws in its
    ``__iter__`` depends on seed and epoch; in a stream with `already_sharded`, on the worker too.)

    Args:
        data: a dataset with ``len`` and ``[i]`` (lists and tensors too), an IterableDataset, or a ready DataLoader,
            whose batch size, order, workers, collate_fn and so on are taken over. Its ``generator`` is not used.
        batch_size: samples per rank and step; with a DataLoader leave it out.
        global_batch: samples per step over all ranks, in place of `batch_size`; at least one per rank. Not with a
            DataLoader: that has a batch size per rank.
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
    if global_batch is not None:
        global_batch = checks.global_batch(global_batch, batch_size, data, here[1])
        batch_size = len(range(here[0], global_batch, here[1]))
    if isinstance(data, DataLoader):
        checks.loader(data, batch_size, shuffle, loader_options)
        loader = data
    else:
        checks.dataset(data, batch_size, loader_options)
        loader = _plain_loader(data, batch_size, shuffle, loader_options)
    return ShardedLoader(
        loader, here, seed=seed, drop_last=drop_last, already_sharded=already_sharded, global_batch=global_batch
    )


class ShardedLoader:
    """One rank's batches of a DataLoader; made by :func:`shard`.

    A *position* counts samples of an epoch over all ranks, in the epoch's order. Where the user's own batch sampler
    makes the batches, its unit is one of those batches; with `already_sharded` it counts this rank's own data.

    Attributes:
        epoch: the epoch that the next ``iter()`` reads; set it to go back, or on after a restart.
        start: the position at which the next ``iter()`` begins, 0 again after it; :meth:`seek` sets it.
        dataset: the user's dataset.
        batch_size: samples that this rank takes of a full global batch; None where the user's batch sampler decides,
            or nothing is batched.
        rank: this rank.
        world_size: number of ranks.
        seed: what the orders are derived from.
        shared: all ranks pass the same data, which is divided here; False with `already_sharded`.

    """

    def __init__(
        self,
        loader: DataLoader[Any],
        here: tuple[int, int],
        *,
        seed: int,
        drop_last: bool | None = None,
        already_sharded: bool = False,
        global_batch: int | None = None,
    ) -> None:
        self.epoch = self.start = 0
        self.dataset: Any = loader.dataset
        self.batch_size = loader.batch_size
        self.seed = seed
        self.rank, self.world_size = here
        self.shared = not already_sharded
        # With data of its own, a rank is a world of one as far as the order goes.
        self._share, world_size = (self.rank, self.world_size) if self.shared else (0, 1)
        own = loader.batch_size or 1
        self._own_batches = loader.batch_size is None and loader.batch_sampler is not None
        self._partition = Partition(
            world_size,
            global_batch if global_batch and self.shared else world_size * own,
            loader.drop_last if drop_last is None else bool(drop_last),
        )
        self._generator = torch.Generator()
        self._source: RankSampler | OwnStream
        self._seeded: Seeded | None = None
        if isinstance(loader.dataset, IterableDataset):
            self._units = checks.length(loader.dataset)
            self._source = self._stream(loader)
            self._loader = self._stream_loader(loader, self._source)
        else:
            order = loader.batch_sampler if self._own_batches else loader.sampler
            self._units = checks.length(order)
            self._source = self._sampler(order, loader)
            self._seeded = Seeded(self.dataset, seed, self.rank)
            self._loader = self._map_loader(loader, self._source, self._seeded)
        if self._units == 0:
            checks.sized(loader.dataset, 0)
        self._warn(sequential=_sequential(loader))

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        seed = derive("fetch", self.seed, epoch, self.rank)
        self._generator.manual_seed(seed)  # DataLoader draws the seeds of its workers from it
        self._source.begin(epoch, start)
        tell(epoch, self.dataset)
        if self._seeded is not None:
            self._seeded.epoch = epoch
        if self._reads_own_stream:
            return self._own_stream_from(start, seed)
        if self._loader.num_workers > 0:
            return iter(self._loader)
        pin = self._loader.pin_memory
        if self._seeded is None or not self._batched or (pin and not torch.cuda.is_available()):
            return batches_under(Kept(), self._loader)
        batches = fetched(iter(self._source), self._seeded, self._loader.collate_fn)
        return map(pin_memory, batches) if pin else batches

    def __len__(self) -> int:
        """Number of batches that this rank gets in an epoch.

        Raises:
            LengthUnknownError: the stream or the sampler does not say.

        """
        return self._partition.batches(self._known(), self._share)

    @property
    def units(self) -> int | None:
        """Samples of an epoch that are seen, all ranks together, counted as positions are; None if nobody knows."""
        return None if self._units is None else self._partition.kept(self._units)

    @property
    def block(self) -> int:
        """Samples in a full global batch, all ranks together, counted as positions are."""
        return self._partition.block

    @property
    def steps(self) -> int:
        """Number of global batches in an epoch: the most batches that any rank gets.

        Raises:
            LengthUnknownError: the stream or the sampler does not say.

        """
        return self._partition.steps(self._known(of_all=True))

    def size_at(self, position: int) -> int:
        """Samples in the global batch that begins at `position`, all ranks together: 0 where the epoch has ended.

        ``position += loader.size_at(position)`` goes from step to step.

        Raises:
            LengthUnknownError: the stream or the sampler does not say, or each rank has data of its own.

        """
        return self._partition.size(self._known(of_all=True), position)

    def count_at(self, position: int, rank: int | None = None) -> int:
        """The part of the global batch at `position` that `rank` takes; None: this rank.

        Raises:
            LengthUnknownError: the stream or the sampler does not say, or another rank has data of its own.

        """
        units = self._known(of_all=rank not in {None, self.rank})
        share = self._share if rank is None or not self.shared else rank
        return self._partition.part(share, self._partition.size(units, position))

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
        return self._partition.size(units, step * self.block)

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

    def seek(self, epoch: int, position: int = 0) -> None:
        """Make the next ``iter()`` go on with `epoch` where `position` samples of it, of all ranks, have been seen.

        ``order[position:]`` is cut into global batches from there on, whatever the number of ranks and the global
        batch were before. At the same ones the batches are equal, bit by bit, to those of an iteration that was
        never left, with any number of workers. Skipped samples are not fetched; a stream has to be read up to the
        position, but what is skipped is not collated.

        With `already_sharded` each rank says its own position; a stream of that kind is read, collated and thrown
        away batch by batch up to there (n batches are n x batch_size, even if some were smaller).

        Raises:
            DataError: the position is negative, beyond the data, or inside a batch of a stream with
                `already_sharded`.

        """
        self.epoch = checks.whole_number("epoch", epoch, 0)
        if self._reads_own_stream:
            self.start = checks.position(position, None, self.block)
        else:
            self.start = checks.position(position, self._units)

    def __repr__(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return f"ShardedLoader({type(self.dataset).__name__}, rank {self.rank} of {self.world_size}{size})"

    @property
    def _reads_own_stream(self) -> bool:
        return not self.shared and isinstance(self._source, OwnStream)

    def _own_stream_from(self, start: int, seed: int) -> Iterator[Any]:
        """The batches of a stream that shards itself: only its workers know how they divide it, so all are made."""
        workers = self._loader.num_workers > 0
        batches = iter(self._loader) if workers else batches_under(Randomness(seed), self._loader)
        return islice(batches, start // self.block, None) if start else batches

    @property
    def _batched(self) -> bool:
        return self.batch_size is not None or self._own_batches

    def _known(self, *, of_all: bool = False, samples: bool = False) -> int:
        units = self._units
        if units is None:
            reason = f"{type(self.dataset).__name__} and its sampler have no length"
        elif of_all and not self.shared:
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
        if self.shared:
            checks.sampler(order)
        if self._units is None and isinstance(loader.sampler, SequentialSampler):
            checks.sized(loader.dataset, None)
        return RankSampler(
            order,
            self._partition,
            rank=self._share,
            seed=self.seed,
            whole=self.batch_size is None,
        )

    def _stream(self, loader: DataLoader[Any]) -> OwnStream:
        about: dict[str, Any] = {"seed": self.seed, "rank": self.rank, "persistent": loader.persistent_workers}
        if self.shared:
            return SharedStream(self.dataset, self._partition, **about)
        return OwnStream(self.dataset, **about)

    def _map_loader(self, loader: DataLoader[Any], order: RankSampler, dataset: Seeded) -> DataLoader[Any]:
        where: dict[str, Any] = {"batch_sampler": order}
        if not self._batched:
            where = {"batch_size": None, "sampler": order}
        start = WorkerStart(loader.worker_init_fn)
        return DataLoader(dataset, worker_init_fn=start, generator=self._generator, **where, **_options_of(loader))

    def _stream_loader(self, loader: DataLoader[Any], stream: OwnStream) -> DataLoader[Any]:
        start = loader.worker_init_fn
        return DataLoader(
            stream,
            batch_size=self.batch_size,
            # A shared stream has left out what is to be left out: the last *global* batch.
            drop_last=self._partition.drop_last and not self.shared,
            worker_init_fn=start if self.shared else WorkerStart(start),
            generator=self._generator,
            **_options_of(loader),
        )

    def _warn(self, *, sequential: bool) -> None:
        """Say once, on the main rank, what would surprise: a loop that some ranks leave early, or an empty one."""
        if self._units is None or not self.shared or self.rank != 0:
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
