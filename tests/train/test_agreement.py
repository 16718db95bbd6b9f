"""Decisions that ranks share: R12, R17, numbers that are not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import instep
from instep.errors import TrainError
from tests.harness import run_job, run_ranks
from tests.train import cases

if TYPE_CHECKING:
    from pathlib import Path


def test_R12_a_stop_on_one_rank_stops_all_at_the_same_step() -> None:
    def work() -> Any:
        @instep.train.on("step_end")
        def stop(trainer: instep.Trainer) -> None:
            if instep.rank() == 1 and trainer.progress.step == 7:
                trainer.stop("rank 1 has seen enough")

        trainer = instep.Trainer(
            cases.net, cases.sgd, cases.data(64), callbacks=[stop], **cases.quiet(global_batch=8, epochs=5_000)
        )
        end = trainer.fit()
        return end.step, end.reason

    job = run_job(work, 2)
    assert job.values[0] == job.values[1]
    assert 7 <= job.values[0][0] < 39_000
    assert job.values[0][1] == "rank 1 has seen enough (rank 1)"
    assert "training stopped at step" in "".join(job.outputs)


def test_R12_a_metric_that_differs_by_rank(tmp_path: Path) -> None:
    """Rank 0 sees improvement, rank 1 does not: early stop and the best checkpoint are decided once."""

    def work() -> Any:
        class Differs(instep.train.Metric):
            """What is no metric at all: each rank has its own."""

            calls = 0

            def start(self) -> Any:
                return {"n": 0}

            def update(self, outputs: Any, targets: Any) -> None:
                pass

            def compute(self, counts: Any) -> float:  # noqa: ARG002
                Differs.calls += 1
                return float(Differs.calls) if instep.rank() == 0 else 0.0

        checkpoints = instep.train.Checkpoints(folder=tmp_path / "c")
        trainer = instep.Trainer(
            cases.net, cases.sgd, cases.data(64), eval_data=cases.data(9), metrics={"score": Differs()}, monitor="score",
            callbacks=[instep.train.EarlyStop("score", patience=1)], checkpoint=checkpoints,
            **cases.quiet(global_batch=8, epochs=5),
        )  # fmt: skip
        end = trainer.fit()
        return end.step, end.epoch, end.best, sorted(path.name for path in (tmp_path / "c").iterdir())

    first, second = run_ranks(work, 2)
    assert first == second
    assert first[0] == 40  # the main rank's score improves


def exhausts(most: int, where: str) -> Any:
    """A training step that runs out of memory on rank 1 with more than `most` samples."""
    tried: list[int] = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Any, size: int) -> Any:
            ctx.size = size
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if instep.rank() == 1 and ctx.size > most:
                raise torch.OutOfMemoryError("CUDA out of memory (in a test)")
            return gradients[0], None

    def step(model: Any, batch: Any) -> Any:
        size = len(batch[0])
        tried.append(size)
        if where == "forward" and instep.rank() == 1 and size > most:
            raise torch.OutOfMemoryError("CUDA out of memory (in a test)")
        loss = cross_entropy(model(batch[0] * (torch.rand(6) > 0.1)), batch[1])
        apply: Any = Backward.apply
        return apply(loss, size) if where == "backward" else loss

    return step, tried


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_R17_out_of_memory_on_one_rank(where: str) -> None:
    def work(most: int) -> Any:
        step, tried = exhausts(most, where)
        options = cases.quiet(loss=None, batch_size_per_rank=16, steps=2, on_oom="split")
        trainer = instep.Trainer(cases.net, cases.sgd, cases.data(64), training_step=step, **options)
        trainer.fit()
        return cases.weights(trainer), tried, trainer.step.split and trainer.step.split.most

    job = run_job(work, 2, 4)
    (ours, mine, most), (_, theirs, same) = job.values
    assert most == same == 4
    # Attempts with 16, 8 and 4: rank 0 computes all its pieces each time, rank 1 comes to its first one.
    assert mine == [16, 8, 8, *[4] * 4, *[4] * 4]
    assert theirs == [16, 8, *[4] * 4, *[4] * 4]
    assert "rank 1 ran out of memory with 16 samples at once: all ranks now take at most 8" in "".join(job.outputs)
    assert cases.equal(ours, job.values[1][0])


def test_R17_the_gradients_of_the_step_are_those_of_the_whole_batch() -> None:
    def work(on_oom: str) -> Any:
        def step(model: Any, batch: Any) -> Any:
            if on_oom == "split" and instep.rank() == 1 and len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory (in a test)")
            return cross_entropy(model(batch[0]), batch[1])

        options = cases.quiet(loss=None, batch_size_per_rank=16, epochs=2, on_oom=on_oom)
        trainer = instep.Trainer(cases.net, cases.sgd, cases.data(61), training_step=step, **options)
        trainer.fit()
        return cases.weights(trainer)

    plain = run_ranks(work, 2, "raise")
    for got in run_ranks(work, 2, "split"):
        assert cases.near(got, plain[0])


def test_R17_a_single_sample_is_too_much() -> None:
    def work() -> Any:
        step, _ = exhausts(0, "forward")
        options = cases.quiet(loss=None, batch_size_per_rank=4, steps=2, on_oom="split")
        instep.Trainer(cases.net, cases.sgd, cases.data(64), training_step=step, **options).fit()

    with pytest.raises(TrainError, match=r"Rank 1 on .* runs out of memory with a single sample"):
        run_ranks(work, 2)


def breaks(what: str, at: int) -> Any:
    """A training step whose loss, or whose gradient, is not finite on rank 1 at one step."""

    def step(model: Any, batch: Any) -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        loss = cross_entropy(model(batch[0]), batch[1])
        if instep.rank() != 1 or step.calls not in calls:  # type: ignore[attr-defined]
            return loss
        if what == "loss":
            return loss * math.nan
        weight = next(iter(model.parameters()))
        return loss + (weight.sum() * 0).sqrt() * 0  # d sqrt(0) is infinite, times 0 is NaN

    calls = (at,) if what == "loss" else (at, at + 1)  # computed once more, to see whose gradient it is
    step.calls = 0  # type: ignore[attr-defined]
    return step


def broken(what: str, policy: str, ranks_step: int = 3) -> Any:
    options = cases.quiet(loss=None, global_batch=8, steps=6, non_finite=policy)
    trainer = instep.Trainer(cases.net, cases.sgd, cases.data(64), training_step=breaks(what, ranks_step), **options)
    end = trainer.fit()
    assert end.report is not None
    return cases.weights(trainer), end.report.skipped, end.report.loss


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_and_names_rank_and_step(what: str) -> None:
    with pytest.raises(TrainError) as caught:
        run_ranks(broken, 2, what, "stop")
    text = str(caught.value)
    assert "step 3" in text
    assert "rank 1 on" in text
    assert "non_finite='skip'" in text


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_is_skipped_on_all_ranks(what: str) -> None:
    job = run_job(broken, 2, what, "skip")
    (first, skipped, loss), (second, also, _) = job.values
    assert skipped == also == 1
    assert cases.equal(first, second)
    assert all(bool(torch.isfinite(one).all()) for one in first)
    assert math.isfinite(loss)
    assert "All ranks skip the update" in "".join(job.outputs)


def test_a_callback_that_fails_on_one_rank_ends_all() -> None:
    def work() -> Any:
        @instep.train.on("step_end")
        def fail(trainer: instep.Trainer) -> None:
            if instep.rank() == 1 and trainer.progress.step == 3:
                raise ValueError("a mistake")

        instep.Trainer(
            cases.net, cases.sgd, cases.data(64), callbacks=[fail], **cases.quiet(global_batch=8, epochs=9)
        ).fit()

    with pytest.raises(ValueError, match="a mistake"):
        run_ranks(work, 2)
