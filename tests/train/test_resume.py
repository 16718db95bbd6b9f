"""Going on from a checkpoint: R1, R6, R22; what it says about what cannot be brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import instep
from tests.harness import run_job, run_ranks
from tests.train import cases

if TYPE_CHECKING:
    from pathlib import Path


class Dropping(nn.Module):
    """Draws random numbers in training, so that their states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.net()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.inner(self.drop(x))


def stopped_at(step: int) -> Any:
    @instep.train.on("step_end")
    def stop(trainer: instep.Trainer) -> None:
        if trainer.progress.step == step:
            raise KeyboardInterrupt  # nothing is saved in leaving

    return stop


def train(folder: Any, *, stop: int | None = None, workers: int = 0, save: int | None = 11, **options: Any) -> Any:
    """Three epochs of 8 steps over 64 samples; what each step saw, the weights, what was asked of the dataset."""
    seen: list[list[int]] = []

    def step(model: nn.Module, batch: Any) -> Any:
        seen.append(batch[2].tolist())
        return cross_entropy(model(batch[0]), batch[1])

    dataset = cases.Watched(64)
    given: dict[str, Any] = {"global_batch": 8, "epochs": 3, "training_step": step, "loss": None} | options
    checkpoints = instep.train.Checkpoints(folder=folder, every_steps=save, every_epochs=None)
    trainer = instep.Trainer(
        Dropping, cases.adamw, dataset, checkpoint=checkpoints, resume="auto", schedule="cosine",
        loader_options={"num_workers": workers}, callbacks=[stopped_at(stop)] if stop else [], **cases.quiet(**given),
    )  # fmt: skip
    try:
        end = trainer.fit()
    except KeyboardInterrupt:
        return seen, None, dataset.asked, None
    return seen, cases.weights(trainer), dataset.asked, (end.step, end.epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_R1_a_resume_in_the_middle_of_an_epoch(tmp_path: Path, workers: int) -> None:
    """Saved at epoch 1, step 3 (step 11 of all), stopped later; new processes go on."""
    whole = run_ranks(train, 2, tmp_path / "whole", workers=workers, limit_s=90)
    first = run_ranks(train, 2, tmp_path / "cut", stop=13, workers=workers, limit_s=90)
    rest = run_ranks(train, 2, tmp_path / "cut", workers=workers, limit_s=90)
    for rank in range(2):
        assert rest[rank][3] == whole[rank][3] == (24, 3)
        assert first[rank][0] == whole[rank][0][:13]
        assert rest[rank][0] == whole[rank][0][11:]  # the same samples in the same order, also in the next epoch
        assert cases.equal(rest[rank][1], whole[rank][1])
        if not workers:
            assert rest[rank][2] == [index for batch in rest[rank][0] for index in batch]  # nothing else was fetched


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_R6_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """4 ranks with a global batch of 16 go on as 2, 1 and 3 (6, 5 and 5 samples): the same samples per step."""
    options: dict[str, Any] = {"epochs": 2, "save": 5, "global_batch": None, "batch_size_per_rank": 4}
    whole = run_ranks(train, 4, tmp_path / "whole", **options)
    run_ranks(train, 4, tmp_path / "cut", stop=6, **options)
    job = run_job(train, ranks, tmp_path / "cut", **options)
    per_step = {1: 4, 2: 2, 3: 2}[ranks]  # forward passes, so that no rank takes more than 4 samples at once
    together = steps_of(job.values, per_step)
    assert [sorted(step) for step in together] == [sorted(step) for step in steps_of(whole, 1)][5:]
    assert all(one[3] == (8, 2) for one in job.values)
    said = "".join(job.outputs)
    assert "global batch of 16 on 4 ranks" in said
    assert "dropout and the like draw other numbers" in said


def steps_of(results: list[Any], passes: int) -> list[list[int]]:
    """The samples of each step, of all ranks together."""
    flat = [one[0] for one in results]
    steps = max(len(one) for one in flat) // passes
    return [
        [i for one in flat for batch in one[step * passes : (step + 1) * passes] for i in batch]
        for step in range(steps)
    ]


def test_R6_a_global_batch_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    def work(ranks: int, **batch: Any) -> Any:
        from torch.utils.data import DataLoader

        loader = DataLoader(cases.data(48), batch_size=3, shuffle=True)
        checkpoints = instep.train.Checkpoints(folder=tmp_path / "c", every_steps=2, every_epochs=None)
        trainer = instep.Trainer(
            cases.net, cases.sgd, loader, checkpoint=checkpoints, resume="auto",
            callbacks=[stopped_at(3)] if ranks == 2 else [], **cases.quiet(epochs=1),
        )  # fmt: skip
        try:
            return trainer.fit().step
        except KeyboardInterrupt:
            return None

    run_ranks(work, 2, 2)
    job = run_job(work, 3, 3)
    assert "cannot be kept on 3 ranks" in "".join(job.outputs)
    assert job.values == [2 + 4] * 3  # 36 samples were left: 4 steps of 9


def test_R22_step_k_means_after_k_updates(tmp_path: Path) -> None:
    def work(steps: int, folder: Any) -> Any:
        options = cases.quiet(global_batch=8, steps=steps, checkpoint=folder, resume="auto")
        trainer = instep.Trainer(cases.net, cases.adamw, cases.data(64), **options)
        end = trainer.fit()
        return end.step, cases.weights(trainer)

    def saved_by_callback(folder: Any) -> Any:
        found = []

        @instep.train.on("step_end")
        def note(trainer: instep.Trainer) -> None:
            found.append(cases.weights(trainer))

        checkpoints = instep.train.Checkpoints(
            folder=folder, every_steps=5, every_epochs=None, keep=1, asynchronous=False
        )
        options = cases.quiet(global_batch=8, steps=9, checkpoint=checkpoints)
        instep.Trainer(cases.net, cases.adamw, cases.data(64), callbacks=[note, stopped_at(6)], **options)
        trainer = instep.Trainer(cases.net, cases.adamw, cases.data(64), callbacks=[note], **options)
        trainer.fit()
        return found

    after = run_ranks(saved_by_callback, 2, tmp_path / "by steps")[0]
    assert len(after) == 9
    # Steps 1 to 5 and then on from there: the weights at 5 are those after five updates.
    step, five = run_ranks(work, 2, 5, tmp_path / "five")[0]
    assert step == 5
    assert cases.equal(five, after[4])
    step, nine = run_ranks(work, 2, 9, tmp_path / "five")[0]
    assert step == 9
    assert cases.equal(nine, after[8])


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    def work() -> Any:
        options = cases.quiet(
            global_batch=8, epochs=2, checkpoint=tmp_path / "c", resume="auto", eval_data=cases.data(9)
        )
        trainer = instep.Trainer(cases.net, cases.adamw, cases.data(20), **options)
        end = trainer.fit()
        return end.step, end.results, cases.weights(trainer)

    first, second = run_ranks(work, 2), run_ranks(work, 2)
    assert [one[:2] for one in first] == [one[:2] for one in second]
    assert cases.equal(first[0][2], second[0][2])


def test_callbacks_schedule_and_best_go_on(tmp_path: Path) -> None:
    def work(stop: int | None) -> Any:
        ema = instep.train.EMA(0.9)
        losses = cases.Losses()
        checkpoints = instep.train.Checkpoints(folder=tmp_path / str(work_name(stop)), every_steps=4, every_epochs=None)
        trainer = instep.Trainer(
            cases.net, cases.adamw, cases.data(64), checkpoint=checkpoints, resume="auto", schedule="linear", warmup=2,
            callbacks=[ema, losses, *([stopped_at(stop)] if stop and stop > 0 else [])], eval_data=cases.data(30, seed=5),
            metrics={"accuracy": instep.train.Accuracy()}, monitor="accuracy",
            **cases.quiet(global_batch=8, epochs=3, log_every=1),
        )  # fmt: skip
        try:
            end = trainer.fit()
        except KeyboardInterrupt:
            return None
        return losses.losses, losses.rates, end.best, end.results

    def work_name(stop: int | None) -> str:
        return "whole" if stop is None else "cut"

    whole = run_ranks(work, 2, None)[0]
    run_ranks(work, 2, 14)
    rest = run_ranks(work, 2, -1)[0]
    assert rest[0] == whole[0][-len(rest[0]) :]
    assert rest[1] == whole[1][-len(rest[1]) :]
    assert rest[2:] == whole[2:]


def test_other_data_and_another_seed_are_said(tmp_path: Path) -> None:
    def work(samples: int, seed: int) -> Any:
        checkpoints = instep.train.Checkpoints(folder=tmp_path / "c", every_steps=3, every_epochs=None)
        options = cases.quiet(global_batch=8, steps=4 if samples == 64 else 6, seed=seed)
        trainer = instep.Trainer(
            cases.net, cases.adamw, cases.data(samples), checkpoint=checkpoints, resume="auto", **options
        )
        return trainer.fit().step

    run_ranks(work, 2, 64, 0)
    job = run_job(work, 2, 80, 1)
    said = "".join(job.outputs)
    assert "the training data are not those of the checkpoint" in said
    assert "seed=1 is not the checkpoint's 0" in said


def test_another_model_is_refused_with_its_keys(tmp_path: Path) -> None:
    def work(width: int) -> Any:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, 4))

        options = cases.quiet(global_batch=8, steps=2, checkpoint=tmp_path / "c", resume="auto")
        return instep.Trainer(model, cases.adamw, cases.data(64), **options).fit().step

    run_ranks(work, 2, 16)
    with pytest.raises(instep.errors.CheckpointError) as caught:
        run_ranks(work, 2, 8)
    assert "0.weight" in str(caught.value)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_strategies_resume_bit_equal(tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "epochs": 2}
    whole = run_ranks(train_full, 2, tmp_path / "whole", None, options, limit_s=60)
    run_ranks(train_full, 2, tmp_path / "cut", 13, options, limit_s=60)
    rest = run_ranks(train_full, 2, tmp_path / "cut", None, options, limit_s=60)
    assert whole[0] is not None
    assert all(torch.equal(rest[0][name], value) for name, value in whole[0].items())


def train_full(folder: Any, stop: int | None, options: dict[str, Any]) -> Any:
    checkpoints = instep.train.Checkpoints(folder=folder, every_steps=11, every_epochs=None)
    trainer = instep.Trainer(
        Dropping, cases.adamw, cases.data(64), checkpoint=checkpoints, resume="auto",
        callbacks=[stopped_at(stop)] if stop else [], **cases.quiet(global_batch=8, **options),
    )  # fmt: skip
    try:
        trainer.fit()
    except KeyboardInterrupt:
        return None
    return trainer.strategy.full_model_state(trainer.wrapped)


def test_the_best_weights_can_be_had_without_training(tmp_path: Path) -> None:
    def trainer(**options: Any) -> instep.Trainer:
        given = cases.quiet(global_batch=8, epochs=4, eval_data=cases.data(40, seed=5), seed=1)
        return instep.Trainer(
            cases.net, cases.adamw, cases.data(64), metrics={"accuracy": instep.train.Accuracy()}, monitor="accuracy",
            **given, **options,
        )  # fmt: skip

    def work() -> Any:
        trained = trainer(checkpoint=tmp_path / "c")
        end = trained.fit()
        again = trainer(checkpoint=tmp_path / "c")
        again.load("best")
        best = again.evaluate()["accuracy"]
        latest = trainer(checkpoint=tmp_path / "c", resume="latest")
        untrained = trainer()
        return end.best, best, latest.evaluate(), end.results, untrained.evaluate()

    for best, loaded, latest, last, untrained in run_ranks(work, 2):
        assert best[0] == loaded
        assert latest == last
        assert untrained["loss"] > latest["loss"]
