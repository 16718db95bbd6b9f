"""Putting a trainer together: the ranks meet, the model is the same everywhere, the pieces find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.comm import get_logger, init
from instep.comm.session import get_session, initialized_dist, together
from instep.data import ShardedLoader, shard
from instep.train import checks, schedule, seeds, sizes
from instep.train.callbacks import default_callbacks
from instep.train.events import Events
from instep.train.memory import Split
from instep.train.modules import transform
from instep.train.precision import Precision
from instep.train.saving import Saver
from instep.train.sharing import share
from instep.train.step import Step
from instep.train.strategies import resolve
from instep.train.windows import Windows

if TYPE_CHECKING:
    from instep.train.trainer import Trainer

_log = get_logger("instep.train")
_EVAL_BATCH = 64


def meet(trainer: Trainer) -> None:
    """The ranks meet; the model gets the same weights on all of them, on their devices.

    Raises:
        JoinError: they did not meet.
        TrainError: what was given is no model.

    """
    if get_session() is None and initialized_dist() is None:
        init()
    session = together("instep.Trainer")
    if not isinstance(trainer.model, torch.nn.Module):
        seeds.seed_model(trainer.seed)
        trainer.model = checks.model(trainer.model())
    if get_session() is None:  # over a process group that the user made: the model is where it is to be
        session.device = next((one.device for one in trainer.model.parameters()), session.device)
    trainer.session = session
    trainer.model.to(session.device)
    share(trainer.model, session)
    trainer.events = Events(
        default_callbacks(trainer.callbacks, folder=trainer.folder, progress=trainer.show_progress),
        is_main=session.is_main,
    )
    trainer.eval_loader = None if trainer.eval_data is None else evaluation_loader(trainer, trainer.eval_data)


def prepare(trainer: Trainer) -> None:
    """All that training needs; reads the checkpoint that it goes on from.

    Raises:
        TrainError: what was given does not fit together.
        DataError: the data cannot be divided.
        CheckpointError: the checkpoint is not there, or is another model's.

    """
    session = trainer.session
    trainer.precision = Precision(trainer.wanted_precision, session.device)
    trainer.strategy = resolve(trainer.wanted_strategy, session.world_size)
    checks.together(trainer)
    assert trainer.given_optimizer is not None  # fit() has looked
    trainer.model = transform(
        trainer.model,
        trainer.strategy,
        session,
        sync_batchnorm=trainer.sync_batchnorm,
        recompute=trainer.activation_checkpointing,
        compile=trainer.compile,
    )
    trainer.wrapped, trainer.optimizer = trainer.strategy.prepare(
        trainer.model, trainer.given_optimizer, session, trainer.precision, fused=trainer.fused
    )
    wishes = trainer.checkpoint
    trainer.saver = None if wishes is None else Saver(trainer, wishes)
    found = trainer.saver.look(trainer.resume) if trainer.saver is not None and trainer.resume is not None else None
    _data(trainer, found.manifest if found is not None else {})
    _learning_rate(trainer)
    trainer.step = Step(
        trainer.wrapped,
        trainer.model,
        trainer.optimizer,
        strategy=trainer.strategy,
        precision=trainer.precision,
        session=session,
        training_step=trainer.training_step,
        clip_norm=trainer.clip_norm,
        non_finite=trainer.non_finite,
        split=Split(session, trainer.weight) if trainer.on_oom == "split" else None,
    )
    if trainer.events.gradients:
        trainer.step.on_gradients = lambda: _tell_gradients(trainer)
    seeds.seed_training(trainer.seed, session.rank)
    if found is not None:
        assert trainer.saver is not None
        trainer.saver.resume(found)


def _tell_gradients(trainer: Trainer) -> None:
    for every, call in trainer.events.gradients:
        if (trainer.progress.step + 1) % every == 0:
            call(trainer)


def _data(trainer: Trainer, saved: dict[str, Any]) -> None:
    """The loader, the size of a step, and how many steps there are."""
    session, data = trainer.session, trainer.train_data
    ready = isinstance(data, (DataLoader, ShardedLoader))
    if ready:
        checks.no_batch_size(trainer)
        per_rank = data.batch_size or 1
        batch = sizes.Sizes(per_rank * session.world_size, trainer.accumulate)
    else:
        batch = sizes.plan(
            trainer.batch_size_per_rank, trainer.wanted_global_batch, trainer.accumulate, session.world_size
        )
    if saved:
        batch = sizes.keep(saved["global_batch"], saved["world_size"], batch, session.world_size, fixed_block=ready)
        if batch.note and session.is_main:
            _log.warning("%s", batch.note)
        if saved["seed"] != trainer.seed and session.is_main:
            _log.warning(
                "seed=%d is not the checkpoint's %d, which the order of the data follows: going on with %d",
                trainer.seed, saved["seed"], saved["seed"],
            )  # fmt: skip
        trainer.seed = saved["seed"]
    loader = _training_loader(trainer, batch.block)
    trainer.global_batch = batch.global_batch
    trainer.windows = Windows(
        loader,
        session,
        accumulate=batch.accumulate,
        weight=trainer.weight,
        uneven=trainer.uneven,
        divisor=trainer.strategy.gradient_divisor(session),
    )
    per_epoch = _steps_in(trainer.windows, batch.global_batch)
    if per_epoch == 0:
        raise checks.no_step(batch.global_batch)
    trainer.steps_per_epoch = per_epoch
    limits = [trainer.wanted_steps]
    if trainer.epochs is not None and per_epoch is not None:
        limits.append(trainer.epochs * per_epoch)
    trainer.steps = min((one for one in limits if one is not None), default=None)


def _steps_in(windows: Windows, global_batch: int) -> int | None:
    """Steps of an epoch; None where nobody knows, as with data that each rank has for itself."""
    units = windows.loader.units
    if units is None or not windows.loader.shared:
        return None
    of_a_step = global_batch if windows.is_counted else windows.loader.block * windows.accumulate
    return -(-units // of_a_step)


def _training_loader(trainer: Trainer, block: int) -> ShardedLoader:
    data = trainer.train_data
    if isinstance(data, ShardedLoader):
        return data
    options: dict[str, Any] = {"seed": trainer.seed, "drop_last": trainer.drop_last or None}
    if isinstance(data, DataLoader):
        return shard(data, **options)
    shuffle = trainer.shuffle
    if shuffle is None and "sampler" not in trainer.loader_options and not isinstance(data, IterableDataset):
        shuffle = True
    return shard(data, global_batch=block, shuffle=shuffle, **options, **trainer.loader_options)


def evaluation_loader(trainer: Trainer, data: Any) -> ShardedLoader:
    """The part of the data that this rank evaluates, in their own order.

    Raises:
        DataError: they cannot be divided.

    """
    if isinstance(data, ShardedLoader):
        return data
    if isinstance(data, DataLoader):
        return shard(data, seed=trainer.seed)
    size = trainer.eval_batch_size or trainer.batch_size_per_rank or _EVAL_BATCH
    options = {
        name: value
        for name, value in trainer.eval_loader_options.items()
        if name not in ("sampler", "batch_sampler", "shuffle", "drop_last")
    }
    return shard(data, size, seed=trainer.seed, **options)


def _learning_rate(trainer: Trainer) -> None:
    factor = schedule.scaled(trainer.scale_lr, trainer.global_batch, trainer.base_batch)
    if factor != 1.0:
        for group in trainer.optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] *= factor
    trainer.schedule = schedule.build(trainer.given_schedule, trainer.optimizer, trainer.steps, trainer.warmup)
