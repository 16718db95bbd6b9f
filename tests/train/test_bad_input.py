"""One clear error that shows the evidence and the cure, before or instead of a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import instep
from instep.errors import CheckpointError, DataError, TrainError
from tests.harness import run_ranks
from tests.train import cases

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {"global_batch": 8, "epochs": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size_per_rank": 0, "global_batch": None}, ["batch_size_per_rank=0", "at least 1"]),
        ({"global_batch": 2.5}, ["global_batch=2.5"]),
        ({"accumulate": 0}, ["accumulate=0"]),
        ({"clip_norm": -1.0}, ["clip_norm=-1.0"]),
        ({"non_finite": "ignore"}, ["non_finite='ignore'", "non_finite='skip'"]),
        ({"on_oom": "pray"}, ["on_oom='pray'"]),
        ({"uneven": "maybe"}, ["uneven='maybe'"]),
        ({"precision": "fp8"}, ["precision='fp8'", "precision='bf16'"]),
        ({"resume": "auto"}, ["resume='auto', checkpoint=None", "checkpoint='checkpoints/mine'"]),
        ({"resume": "auto", "checkpoint": instep.train.Checkpoints()}, ["a folder of its own"]),
        ({"metrics": {"accuracy": instep.train.Accuracy()}}, ["accuracy", "eval_data=None"]),
        ({"max_time": "soon"}, ["max_time='soon'", "23:50:00"]),
        ({"seed": "a"}, ["seed='a'"]),
        ({"log_every": 0}, ["log_every=0"]),
    ],
)
def test_arguments(options: dict[str, Any], words: list[str]) -> None:
    """Refused in the constructor, where no rank waits for another."""
    with pytest.raises(TrainError) as caught:
        instep.Trainer(cases.net, cases.sgd, cases.data(8), loss=cross_entropy, **(GOOD | options))
    assert all(word in str(caught.value) for word in words), caught.value


def both_sizes() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(batch_size_per_rank=4, **GOOD))


def no_size() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(epochs=1))


def no_end() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(global_batch=4))


def no_optimizer() -> Any:
    return instep.Trainer(cases.net, None, cases.data(8), **cases.quiet(**GOOD))


def no_data() -> Any:
    return instep.Trainer(cases.net, cases.sgd, **cases.quiet(**GOOD))


def empty_data() -> Any:
    return instep.Trainer(cases.net, cases.sgd, [], **cases.quiet(**GOOD))


def nothing_left() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(7), **cases.quiet(drop_last=True, **GOOD))


def other_parameters() -> Any:
    other = cases.net()
    return instep.Trainer(cases.net(), cases.sgd(list(other.parameters())), cases.data(8), **cases.quiet(**GOOD))


def early_optimizer() -> Any:
    return instep.Trainer(cases.net, cases.sgd(list(cases.net().parameters())), cases.data(8), **cases.quiet(**GOOD))


def no_model() -> Any:
    return instep.Trainer(lambda: "a model", cases.sgd, cases.data(8), **cases.quiet(**GOOD))  # type: ignore[arg-type, return-value]


def unknown_strategy() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(strategy="ddp2", **GOOD))


def unknown_schedule() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(schedule="zigzag", **GOOD))


def foreign_schedule() -> Any:
    optimizer = cases.sgd(list(cases.net().parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(schedule=schedule, **GOOD))


def loss_per_sample() -> Any:
    def loss(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs, targets, reduction="none")

    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(**GOOD) | {"loss": loss})


def loss_of_nothing() -> Any:
    return instep.Trainer(
        cases.net, cases.sgd, cases.data(8), **cases.quiet(**GOOD) | {"loss": lambda *_: torch.ones(())}
    )


def no_loss() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(**GOOD) | {"loss": None})


def unknown_monitor() -> Any:
    options = cases.quiet(
        eval_data=cases.data(8), metrics={"top1": instep.train.Accuracy()}, monitor="accuracy", **GOOD
    )
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **options)


def no_callback() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), callbacks=[print], **cases.quiet(**GOOD))  # type: ignore[list-item]


def no_target() -> Any:
    class Fields(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    def stack(samples: Any) -> Any:
        return dict(zip("xy", map(torch.stack, zip(*samples, strict=True)), strict=True))

    options = cases.quiet(target="label", loader_options={"collate_fn": stack}, **GOOD)
    return instep.Trainer(lambda: nn.Sequential(Fields(), nn.Linear(6, 4)), cases.sgd, cases.data(8), **options)


def scaling_without_a_base() -> Any:
    return instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(scale_lr="linear", **GOOD))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (both_sizes, ["batch_size_per_rank=4, global_batch=8"]),
        (no_size, ["batch_size_per_rank=None, global_batch=None"]),
        (no_end, ["epochs=None, steps=None"]),
        (no_optimizer, ["optimizer=None", "torch.optim.AdamW"]),
        (no_data, ["train_data=None"]),
        (empty_data, ["no samples"]),
        (nothing_left, ["An epoch has no step", "drop_last=False"]),
        (other_parameters, ["not the model's"]),
        (early_optimizer, ["Make both a function"]),
        (no_model, ["gave a str"]),
        (unknown_strategy, ["'ddp2'", "'hsdp'"]),
        (unknown_schedule, ["'zigzag'", "'cosine'"]),
        (foreign_schedule, ["another optimizer", "schedule=lambda optimizer"]),
        (loss_per_sample, ["no scalar", "its shape is [4]", "loss.mean()"]),
        (loss_of_nothing, ["does not depend on any parameter"]),
        (no_loss, ["There is no loss", "loss=torch.nn.functional.cross_entropy"]),
        (unknown_monitor, ["'accuracy'", "there is: loss, top1"]),
        (no_callback, ["no callback", "instep.train.Callback"]),
        (no_target, ["How is Sequential called"]),
        (scaling_without_a_base, ["base_batch=256"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_does_not_fit_together(make: Any, words: list[str]) -> None:
    """All ranks get the same error; nobody hangs."""

    def work() -> str:
        try:
            make().fit()
        except (TrainError, DataError) as error:
            return str(error)
        return "no error"

    for text in run_ranks(work, 2):
        assert all(word in text for word in words), text


def test_unused_parameters_are_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.forgotten = cases.net(), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    def work(**options: Any) -> Any:
        trainer = instep.Trainer(Half, cases.sgd, cases.data(16), **cases.quiet(**GOOD, **options))
        trainer.fit()
        return trainer.progress.step

    with pytest.raises(TrainError) as caught:
        run_ranks(work, 2)
    assert "forgotten.weight" in str(caught.value)
    assert "forgotten.bias" in str(caught.value)
    assert run_ranks(work, 1) == [2]
    assert run_ranks(work, 2, strategy=instep.train.DDP(find_unused_parameters=True)) == [2, 2]


def test_a_metric_that_raises_on_one_rank_ends_all() -> None:
    class Raises(instep.train.Metric):
        def start(self) -> Any:
            return {"n": 0}

        def update(self, outputs: Any, targets: Any) -> None:  # noqa: ARG002
            if instep.rank() == 1:
                raise ValueError("this metric is wrong")

        def compute(self, counts: Any) -> float:  # noqa: ARG002
            return 0.0

    def work() -> Any:
        options = cases.quiet(eval_data=cases.data(8), metrics={"wrong": Raises()}, **GOOD)
        instep.Trainer(cases.net, cases.sgd, cases.data(8), **options).fit()

    with pytest.raises(ValueError, match="this metric is wrong"):
        run_ranks(work, 2)


def test_a_lambda_in_what_must_be_saved(tmp_path: Path) -> None:
    class Keeps(instep.train.Callback):
        def state_dict(self) -> Any:
            return {"rule": lambda x: x}

    def work() -> Any:
        options = cases.quiet(checkpoint=tmp_path / "c", **GOOD)
        instep.Trainer(cases.net, cases.sgd, cases.data(8), callbacks=[Keeps()], **options).fit()

    with pytest.raises(CheckpointError) as caught:
        run_ranks(work, 2)
    assert "Keeps" in str(caught.value)
    assert "<lambda>" in str(caught.value)
    assert not list(tmp_path.glob("c/step-*"))


def test_a_collective_strategy_cannot_split() -> None:
    def work() -> Any:
        instep.Trainer(
            cases.net, cases.sgd, cases.data(8), **cases.quiet(strategy="fsdp", on_oom="split", **GOOD)
        ).fit()

    with pytest.raises(TrainError, match="on_oom='split' cannot work"):
        run_ranks(work, 2)


def test_attributes_that_are_not_there_yet() -> None:
    trainer = instep.Trainer(cases.net, cases.sgd, cases.data(8), **cases.quiet(**GOOD))
    with pytest.raises(AttributeError):
        _ = trainer.wrapped
