"""What does not fit together is refused here, before any rank waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.errors import TrainError

if TYPE_CHECKING:
    from instep.train.trainer import Trainer

_SMALLER = ("loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "wer", "cer")


def arguments(trainer: Trainer) -> None:
    """Look at each argument by itself.

    Raises:
        TrainError: one of them makes no sense.

    """
    if not isinstance(trainer.model, nn.Module) and not callable(trainer.model):
        raise TrainError(
            f"This is no model: {type(trainer.model).__name__}.",
            evidence=[repr(trainer.model)[:100]],
            cure="A torch.nn.Module, or a function that makes one.",
        )
    for name, least in (
        ("batch_size_per_rank", 1),
        ("wanted_global_batch", 1),
        ("eval_batch_size", 1),
        ("evaluate_every", 1),
        ("epochs", 0),
        ("wanted_steps", 0),
        ("base_batch", 1),
    ):
        if getattr(trainer, name) is not None:
            _whole(name, getattr(trainer, name), least)
    for name, least in (("accumulate", 1), ("warmup", 0), ("log_every", 1)):
        _whole(name, getattr(trainer, name), least)
    if isinstance(trainer.seed, bool) or not isinstance(trainer.seed, int):
        raise TrainError("seed has to be a whole number.", evidence=[f"seed={trainer.seed!r}"], cure="seed=0")
    clip = trainer.clip_norm
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0):
        raise TrainError(
            "clip_norm has to be a number above 0.", evidence=[f"clip_norm={clip!r}"], cure="clip_norm=1.0"
        )
    _one_of("non_finite", trainer.non_finite, ("stop", "skip"))
    _one_of("on_oom", trainer.on_oom, ("raise", "split"))
    _one_of("uneven", trainer.uneven, ("join", "stop"))
    _one_of("precision", trainer.wanted_precision, ("fp32", "bf16", "fp16"))
    if trainer.resume is not None and trainer.checkpoint is None:
        raise no_folder(trainer.resume)
    by_name = isinstance(trainer.resume, int) or trainer.resume in ("auto", "latest", "best")
    if by_name and trainer.checkpoint is not None and trainer.checkpoint.folder is None:
        raise TrainError(
            "Resume from where? Each run has a folder of its own, so the last run's checkpoints are not in this one's.",
            evidence=[f"resume={trainer.resume!r}, Checkpoints(folder=None)"],
            cure="Name one that all runs share:  checkpoint='checkpoints/mine'",
        )
    if trainer.metrics is not None and trainer.eval_data is None and trainer.train_data is not None:
        raise no_evaluation_data(trainer.metrics)


def for_training(trainer: Trainer) -> None:
    """See that all is there that fit() needs.

    Raises:
        TrainError: something is missing.

    """
    if trainer.train_data is None:
        raise TrainError(
            "There is nothing to train on.", evidence=["train_data=None"], cure="Trainer(model, optimizer, data)"
        )
    if trainer.given_optimizer is None:
        raise TrainError(
            "There is no optimizer.",
            evidence=["optimizer=None"],
            cure="Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data, ...)\n"
            "or a function:  lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    if isinstance(trainer.given_optimizer, torch.optim.Optimizer) and not isinstance(trainer.model, nn.Module):
        raise TrainError(
            "The optimizer is made already, and the model is a function that has not been called yet.",
            cure="Make both a function:  lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    if trainer.epochs is None and trainer.wanted_steps is None:
        raise TrainError(
            "When does training end?", evidence=["epochs=None, steps=None"], cure="epochs=10, or steps=10_000"
        )
    if trainer.monitor is not None and trainer.eval_data is None:
        raise TrainError(
            f"Nothing gives the monitored value {trainer.monitor!r}: there are no evaluation data.",
            cure="Trainer(..., eval_data=..., metrics={...}), or leave monitor out.",
        )
    known = metric_names(trainer)
    if trainer.monitor is not None and known is not None and trainer.monitor not in known:
        raise unknown_monitor(trainer.monitor, known)


def together(trainer: Trainer) -> None:
    """Look at arguments that exclude each other, once strategy and world are known.

    Raises:
        TrainError: they do.

    """
    if trainer.on_oom == "split" and trainer.strategy.collective_forward:
        raise TrainError(
            f"on_oom='split' cannot work with strategy={trainer.strategy.name!r}: its forward pass needs all ranks, "
            "and the one that ran out of memory has left it.",
            cure="on_oom='raise' and a smaller batch_size_per_rank with more accumulate, or strategy='ddp'.",
        )


def model(made: Any) -> nn.Module:
    """What the function for the model gave.

    Raises:
        TrainError: it is no module.

    """
    if not isinstance(made, nn.Module):
        raise TrainError(
            f"The function for the model gave a {type(made).__name__}.", cure="Return the torch.nn.Module."
        )
    return made


def no_batch_size(trainer: Trainer) -> None:
    """Refuse a batch size beside a loader that has one.

    Raises:
        TrainError: it is said twice.

    """
    given = {
        "batch_size_per_rank": trainer.batch_size_per_rank,
        "global_batch": trainer.wanted_global_batch,
        "shuffle": trainer.shuffle,
        "loader_options": trainer.loader_options or None,
    }
    said = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if said:
        raise TrainError(
            "A loader brings its own batch size, order and options.",
            evidence=said,
            cure="Leave them out, or pass the dataset:  Trainer(model, optimizer, loader.dataset, ...)",
        )


def loss_in(outputs: Any) -> Tensor:
    """The loss in a model's outputs.

    Raises:
        TrainError: there is none.

    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Tensor) and outputs.dim() == 0:
        found = outputs
    if not isinstance(found, Tensor):
        raise TrainError(
            "There is no loss: none was given, and the model's output has none.",
            evidence=[f"the model gave a {type(outputs).__name__}"],
            cure="Trainer(..., loss=torch.nn.functional.cross_entropy)",
        )
    return found


def monitored(name: str, results: Mapping[str, float]) -> float:
    """The monitored value.

    Raises:
        TrainError: no metric gives it; those that are there are listed.

    """
    if name not in results:
        raise unknown_monitor(name, list(results))
    return results[name]


def no_folder(which: object) -> TrainError:
    """The error for a checkpoint without a folder of them."""
    return TrainError(
        "Resume from where? No folder of checkpoints is given.",
        evidence=[f"resume={which!r}, checkpoint=None"],
        cure="Trainer(..., checkpoint='checkpoints/mine', resume='auto')",
    )


def no_step(global_batch: int) -> TrainError:
    """The error for data that do not suffice for one step."""
    return TrainError(
        "An epoch has no step.",
        evidence=[f"the training data give no global batch of {global_batch} samples"],
        cure="A smaller batch, or drop_last=False.",
    )


def unknown_monitor(name: str, known: list[str]) -> TrainError:
    """The error for a monitor that nothing gives."""
    return TrainError(
        f"No metric gives the monitored value {name!r}.",
        evidence=[f"there is: {', '.join(known) or 'nothing'}"],
        cure=f"monitor={known[0]!r}" if known else "Trainer(..., metrics={...})",
    )


def metric_names(trainer: Trainer) -> list[str] | None:
    """What evaluation will give, None where that shows only later."""
    if not isinstance(trainer.metrics, Mapping) or type(trainer.metrics) is not dict:
        return None if trainer.metrics is not None else ["loss"] * (trainer.loss is not None)
    return [*(["loss"] if trainer.loss is not None else []), *trainer.metrics]


def larger_is_better(name: str) -> bool:
    """By the name: losses, errors and perplexities are better when smaller."""
    return not any(part in _SMALLER for part in name.lower().replace("-", "_").replace("/", "_").split("_"))


def no_evaluation_data(metrics: Any) -> TrainError:
    """The error for metrics without data."""
    names = list(metrics) if isinstance(metrics, Mapping) else [type(metrics).__name__]
    return TrainError(
        "There are no data to evaluate on.",
        evidence=[f"metrics: {', '.join(map(str, names))}", "eval_data=None"],
        cure="Trainer(..., eval_data=...), or trainer.evaluate(data)",
    )


def _whole(name: str, value: object, least: int) -> None:
    name = name.removeprefix("wanted_")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TrainError(
            f"{name} has to be a whole number of at least {least}.",
            evidence=[f"{name}={value!r}"],
            cure=f"{name}={max(least, 1)}",
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TrainError(f"There is no {name}={value!r}.", cure=" or ".join(f"{name}={one!r}" for one in allowed))
