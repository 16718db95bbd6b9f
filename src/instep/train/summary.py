"""What is about to happen, printed once before training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instep.train.trainer import Trainer


def print_summary(trainer: Trainer) -> None:
    """Print it, on the main rank."""
    if trainer.session.is_main:
        print("\n".join(lines(trainer)), flush=True)


def lines(trainer: Trainer) -> list[str]:
    """World, model, batch, data, optimizer, checkpoints."""
    rows = {
        "world": _world(trainer),
        "model": _model(trainer),
        "global batch": _batch(trainer),
        "data": _data(trainer),
        "optimizer": _optimizer(trainer),
    }
    if trainer.saver is not None:
        wishes = trainer.saver.wishes
        every = [
            _each(number, word)
            for number, word in ((wishes.every_steps, "step"), (wishes.every_epochs, "epoch"))
            if number
        ]
        rows["checkpoints"] = f"{' and '.join(every) or 'at the end'}, in {trainer.saver.folder.path}"
    if trainer.progress.step:
        rows["goes on"] = f"after step {trainer.progress.step}, in epoch {trainer.progress.epoch + 1}"
    return [f"{name:<13} {text}" for name, text in rows.items()]


def _world(trainer: Trainer) -> str:
    session = trainer.session
    hosts = len(set(session.hosts)) or 1
    parts = [
        _count(session.world_size, "rank") + (f" on {_count(hosts, 'machine')}" if session.world_size > 1 else ""),
        str(session.device),
        trainer.strategy.name,
        trainer.precision.name,
        f"seed {trainer.seed}" + (", deterministic" if trainer.deterministic else ""),
    ]
    return " · ".join(parts)


def _model(trainer: Trainer) -> str:
    parameters = list(trainer.model.parameters())
    every = sum(one.numel() for one in parameters)
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    text = f"{type(trainer.model).__name__.removeprefix('FSDP')}, {every:,} parameters"
    return text if trained == every else f"{text}, {trained:,} of them trained"


def _batch(trainer: Trainer) -> str:
    windows, ranks = trainer.windows, trainer.session.world_size
    if not windows.is_counted and windows.loader.batch_size is None:
        return "as the batch sampler makes it"
    per_rank, rest = divmod(windows.loader.block, ranks if windows.loader.shared else 1)
    share = f"{per_rank} to {per_rank + 1}" if rest else str(per_rank)
    return f"{trainer.global_batch} = {share} per rank x {_count(ranks, 'rank')} x {windows.accumulate} accumulated"


def _data(trainer: Trainer) -> str:
    units, per_epoch = trainer.windows.loader.units, trainer.steps_per_epoch
    parts = ["of unknown length" if units is None or per_epoch is None else f"{units:,} samples"]
    if per_epoch is not None:
        parts.append(f"{_count(per_epoch, 'step')} per epoch")
    if trainer.epochs is not None:
        parts.append(_count(trainer.epochs, "epoch"))
    if trainer.steps is not None:
        parts.append(f"{_count(trainer.steps, 'step')} in all")
    return ", ".join(parts)


def _optimizer(trainer: Trainer) -> str:
    groups = trainer.optimizer.param_groups
    rates = sorted({float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups})
    text = type(getattr(trainer.optimizer, "optim", trainer.optimizer)).__name__ + (
        " (fused)" if groups[0].get("fused") else ""
    )
    text += f", learning rate {' and '.join(f'{rate:g}' for rate in rates)}"
    if trainer.scale_lr is not None:
        text += f" (scaled for global batch {trainer.global_batch} from {trainer.base_batch}: {trainer.scale_lr})"
    if trainer.given_schedule is not None:
        shape = trainer.given_schedule
        text += f", {shape if isinstance(shape, str) else type(trainer.schedule).__name__}"
    if trainer.warmup:
        text += f" after {_count(trainer.warmup, 'step')} of warm-up"
    if trainer.clip_norm is not None:
        text += f", gradients clipped at {trainer.clip_norm:g}"
    return text


def _each(number: int, word: str) -> str:
    return f"every {word}" if number == 1 else f"every {number:,} {word}s"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
