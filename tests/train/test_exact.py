"""The numbers of N ranks are those of one: R3, R7, R10, R20 and what else a step is made of."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import instep
from tests.harness import run_ranks
from tests.train import cases


@pytest.mark.parametrize(("samples", "accumulate"), [(61, 1), (61, 3), (2, 1)])
def test_the_weights_do_not_depend_on_the_number_of_ranks(accumulate: int, samples: int) -> None:
    """61 samples in global batches of 12: the last step has one, so some ranks have none; 2 are fewer than ranks."""

    def work() -> Any:
        losses = cases.Losses()
        options = cases.quiet(global_batch=12, accumulate=accumulate, epochs=2, clip_norm=0.5, log_every=1)
        trainer = instep.Trainer(cases.net, cases.adamw, cases.data(samples), callbacks=[losses], **options)
        end = trainer.fit()
        return cases.weights(trainer), losses.losses, end.step, trainer.progress.samples

    alone = run_ranks(work, 1)[0]
    assert alone[3] == 2 * samples
    for ranks in (2, 4):
        for one in run_ranks(work, ranks):
            assert one[2:] == alone[2:]
            assert cases.near(one[0], alone[0])
            assert one[1] == pytest.approx(alone[1], abs=1e-6)


def test_R3_the_schedule_depends_on_the_step_alone() -> None:
    def work(accumulate: int, schedule: Any) -> list[float]:
        rates = []

        @instep.train.on("step_end")
        def note(trainer: instep.Trainer) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])

        # The same number of steps whatever the ranks: the global batch is what is given.
        options = cases.quiet(global_batch=12, accumulate=accumulate, steps=60, schedule=schedule, warmup=5)
        instep.Trainer(cases.net, cases.sgd, cases.data(60), callbacks=[note], **options).fit()
        return rates

    def falling(optimizer: Any, steps: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    # The rate a fifth of the way down, and at the end: torch's own LinearLR, after 5 steps of warm-up, is 5 from its.
    for schedule, fifth, last in (
        ("cosine", (1 + math.cos(math.pi / 5)) / 2, 0.0),
        ("linear", 4 / 5, 0.0),
        (falling, 1 - 11 / 60, 5 / 60),
    ):
        alone = run_ranks(work, 1, 1, schedule)[0]
        assert len(alone) == 60
        assert [alone[at] / max(alone) for at in (4, 15, 59)] == pytest.approx([1.0, fifth, last])
        assert run_ranks(work, 4, 3 if schedule == "linear" else 1, schedule) == [alone] * 4


def test_R10_accumulation_with_clipping() -> None:
    """Window 4, 10 micro-batches of 2 x 3 samples: three steps, of which the last has two micro-batches."""

    def work(accumulate: int) -> Any:
        norms, reductions = [], []

        @instep.train.on("fit_start")
        def watch(trainer: instep.Trainer) -> None:
            if trainer.session.world_size == 1:
                return
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch wants its own annotations or none
                reductions.append(trainer.progress.step)
                return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the default group

            trainer.wrapped.register_comm_hook(None, hook)  # type: ignore[operator]  # it is a DDP

        @instep.train.on("gradients")
        def note(trainer: instep.Trainer) -> None:
            norms.append(float(trainer.strategy.norm(trainer.step.parameters)))

        options = cases.quiet(
            global_batch=6 * accumulate, accumulate=accumulate, epochs=1, clip_norm=0.1, shuffle=False
        )
        trainer = instep.Trainer(cases.net, cases.sgd, cases.data(60), callbacks=[watch, note], **options)
        trainer.fit()
        return cases.weights(trainer), norms, reductions

    def concatenated() -> Any:
        """By hand, one process: each window as one batch."""
        torch.manual_seed(0)
        instep.train.seeds.seed_model(0)
        model = cases.net()
        optimizer = cases.sgd(list(model.parameters()))
        x, y = cases.data(60).tensors
        for window in (slice(0, 24), slice(24, 48), slice(48, 60)):
            optimizer.zero_grad()
            cross_entropy(model(x[window]), y[window]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return [one.detach() for one in model.parameters()]

    by_hand = run_ranks(concatenated, 1)[0]
    alone, norms, _ = run_ranks(work, 1, 4)[0]
    assert cases.near(alone, by_hand)
    assert len(norms) == 3
    for got, their_norms, reductions in run_ranks(work, 2, 4):
        assert cases.near(got, by_hand)
        assert their_norms == pytest.approx(norms, abs=1e-6)
        assert reductions == [0, 1, 2]  # one bucket, reduced once per step


@pytest.mark.parametrize("accumulate", [1, 4])
def test_R20_the_validation_loss_is_not_divided_and_changes_nothing(accumulate: int) -> None:
    """The true loss of the constant data is 2.0, mid-window and at its end, and training does not notice."""

    def work(evaluate_every: int | None) -> Any:
        def loss(outputs: Any, targets: Any) -> Any:
            return (outputs.mean() * 0 + targets).mean() + 0.0 * outputs.sum() + (outputs - outputs.detach()).mean()

        found = []

        @instep.train.on("evaluate_end")
        def note(trainer: instep.Trainer, results: dict[str, float]) -> None:
            found.append(results["loss"])

        constant = TensorDataset(torch.ones(24, 6), torch.full((24,), 2.0))
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        extra: dict[str, Any] = {"eval_data": constant, "evaluate_every": evaluate_every} if evaluate_every else {}
        options = cases.quiet(loss=loss, batch_size_per_rank=3, accumulate=accumulate, steps=4, **extra)
        torch.manual_seed(1)
        for one in model.parameters():
            nn.init.constant_(one, 0.1)
        trainer = instep.Trainer(model, cases.sgd(list(model.parameters())), constant, callbacks=[note], **options)
        trainer.fit()
        return found, cases.weights(trainer)

    without = run_ranks(work, 2, None)
    for every in (1, 3):
        for (found, got), (_, alone) in zip(run_ranks(work, 2, every), without, strict=True):
            assert found
            assert set(found) == {2.0}
            assert cases.equal(got, alone)


def test_token_weights_over_micro_batches_and_ranks() -> None:
    """The mean over all tokens that count, of all ranks and micro-batches: what one process with one batch has."""

    def work(global_batch: int, accumulate: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 5, 6, generator=generator)
        y = torch.randint(0, 4, (40, 5), generator=generator)
        y[torch.rand(40, 5, generator=generator) < 0.5] = -100

        def loss(outputs: Any, targets: Any) -> Any:
            return cross_entropy(outputs.flatten(0, 1), targets.flatten())

        losses = cases.Losses()
        options = cases.quiet(
            loss=loss, weight=lambda batch: (batch[1] != -100).sum(), eval_data=TensorDataset(x, y), log_every=1
        )
        trainer = instep.Trainer(
            cases.net, cases.sgd, TensorDataset(x, y),
            global_batch=global_batch, accumulate=accumulate, epochs=2, callbacks=[losses], **options,
        )  # fmt: skip
        end = trainer.fit()
        return cases.weights(trainer), losses.losses, end.results["loss"]

    alone = run_ranks(work, 1, 16, 1)[0]
    for ranks, accumulate in ((1, 4), (2, 1), (2, 2), (3, 2)):
        for one in run_ranks(work, ranks, 16, accumulate):
            assert cases.near(one[0], alone[0])
            assert one[1] == pytest.approx(alone[1], abs=1e-6)
            assert one[2] == pytest.approx(alone[2], abs=1e-6)


class Stream(IterableDataset[Any]):
    """Each rank's own data: so many batches of 2."""

    def __init__(self, batches: int, rank: int) -> None:
        self.batches = batches
        self.rank = rank

    def __iter__(self) -> Any:
        x, y = cases.data(2 * self.batches, seed=self.rank).tensors
        return zip(x, y, strict=True)


class Talking(nn.Module):
    """A network whose forward pass is collective, as with SyncBatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.net()

    def forward(self, x: torch.Tensor) -> Any:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(1))
        return self.inner(x)


@pytest.mark.parametrize("talking", [False, True])
@pytest.mark.parametrize(("uneven", "steps", "samples"), [("stop", 3, 18), ("join", 10, 40)])
def test_R7_unequal_data(uneven: Any, steps: int, samples: int, talking: bool) -> None:
    """10, 7 and 3 batches on three ranks: all stop with the first, or go on to the last."""

    def work() -> Any:
        rank = instep.rank()
        counts = []

        @instep.train.on("step_end")
        def note(trainer: instep.Trainer) -> None:
            counts.append(trainer.progress.samples)

        loader = instep.shard(Stream([10, 7, 3][rank], rank), 2, already_sharded=True)
        options = cases.quiet(epochs=1, uneven=uneven, eval_data=cases.data(7))
        trainer = instep.Trainer(Talking if talking else cases.net, cases.sgd, loader, callbacks=[note], **options)
        end = trainer.fit()
        return end.step, counts[-1], cases.weights(trainer), counts

    results = run_ranks(work, 3)
    for one in results:
        assert one[:2] == (steps, samples)
        assert cases.equal(one[2], results[0][2])
    if uneven == "join":  # 3 ranks for 3 steps, 2 for 4, one for 3
        assert results[0][3] == [6, 12, 18, 22, 26, 30, 34, 36, 38, 40]


def test_R7_a_rank_without_any_data_joins() -> None:
    def work() -> Any:
        rank = instep.rank()
        loader = instep.shard(Stream([0, 4][rank], rank), 2, already_sharded=True)
        trainer = instep.Trainer(cases.net, cases.sgd, loader, **cases.quiet(epochs=1))
        trainer.fit()
        return cases.weights(trainer)

    def alone() -> Any:
        loader = instep.shard(Stream(4, 1), 2)
        trainer = instep.Trainer(cases.net, cases.sgd, loader, **cases.quiet(epochs=1))
        trainer.fit()
        return cases.weights(trainer)

    [single] = run_ranks(alone, 1)
    for got in run_ranks(work, 2):
        assert cases.near(got, single)


def test_a_shared_stream_equals_one_process() -> None:
    class Whole(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(*cases.data(29).tensors, strict=True)

    def work() -> Any:
        trainer = instep.Trainer(cases.net, cases.sgd, Whole(), **cases.quiet(global_batch=6, accumulate=2, epochs=2))
        trainer.fit()
        return cases.weights(trainer), trainer.progress.step

    alone, steps = run_ranks(work, 1)[0]
    assert steps == 10
    for ranks in (2, 3):
        for got, their_steps in run_ranks(work, ranks):
            assert their_steps == steps
            assert cases.near(got, alone)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "own step", "subclass", "output has the loss"])
def test_every_kind_of_batch_trains_alike(kind: str) -> None:
    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = cases.net()

        def forward(self, x: Any, unknown: Any = None, label: Any = None) -> Any:  # noqa: ARG002
            outputs = self.inner(x)
            return {"loss": cross_entropy(outputs, label)} if kind == "output has the loss" else outputs

    def stack(samples: Any) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        if kind in ("tuple", "own step", "subclass"):
            return x, y
        return Batch(x, y) if kind == "dataclass" else {"x": x, "label": y}

    class Own(instep.Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": cross_entropy(model(batch[0]), batch[1]), "twice": 2}

    def work() -> Any:
        kinds: dict[str, dict[str, Any]] = {
            "own step": {"training_step": lambda model, batch: cross_entropy(model(batch[0]), batch[1]), "loss": None},
            "subclass": {"loss": None},
            "output has the loss": {"loss": None},
            "dict": {"target": "label"},
            "dataclass": {"target": "label"},
        }
        options = cases.quiet(**kinds.get(kind, {}), loader_options={"collate_fn": stack}, global_batch=8, epochs=2)
        make = Own if kind == "subclass" else instep.Trainer
        trainer = make(Fields, cases.sgd, cases.data(30), **options)
        end = trainer.fit()
        assert end.report is not None
        assert kind != "subclass" or end.report.values == {"twice": 2.0}
        return cases.weights(trainer)

    [plain] = run_ranks(_plain, 1)
    for got in run_ranks(work, 2):
        assert cases.near(got, plain)


def _plain() -> Any:
    trainer = instep.Trainer(cases.net, cases.sgd, cases.data(30), **cases.quiet(global_batch=8, epochs=2))
    trainer.fit()
    return cases.weights(trainer)


def test_a_ready_loader_is_taken_over() -> None:
    def work() -> Any:
        loader = DataLoader(cases.data(30), batch_size=8 // instep.world_size(), shuffle=True)
        trainer = instep.Trainer(cases.net, cases.sgd, loader, **cases.quiet(epochs=2))
        trainer.fit()
        return cases.weights(trainer)

    [plain] = run_ranks(_plain, 1)
    for ranks in (1, 2):
        for got in run_ranks(work, ranks):
            assert cases.near(got, plain)


def test_the_learning_rate_follows_the_global_batch() -> None:
    def work(rule: Any) -> Any:
        options = cases.quiet(batch_size_per_rank=4, accumulate=2, steps=1, scale_lr=rule, base_batch=4)
        trainer = instep.Trainer(cases.net, cases.sgd, cases.data(64), **options)
        trainer.fit()
        return trainer.optimizer.param_groups[0]["lr"], instep.train.summary.lines(trainer)

    rate, summary = run_ranks(work, 2, "linear")[0]
    assert rate == pytest.approx(0.4)
    assert any("16 = 4 per rank x 2 ranks x 2 accumulated" in line for line in summary)
    assert any("learning rate 0.4 (scaled for global batch 16 from 4: linear)" in line for line in summary)
    assert run_ranks(work, 2, "sqrt")[0][0] == pytest.approx(0.2)


def test_runs_are_bit_equal_and_ranks_draw_different_dropout() -> None:
    def work() -> Any:
        drawn = []

        class Dropping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = cases.net()

            def forward(self, x: Any) -> Any:
                mask = torch.rand(6)
                drawn.append(mask)
                return self.inner(x * mask)

        options = cases.quiet(global_batch=8, epochs=1, deterministic=True, seed=3)
        trainer = instep.Trainer(Dropping, cases.adamw, cases.data(16), **options)
        trainer.fit()
        return cases.weights(trainer), drawn

    (first, mine), (other, theirs) = run_ranks(work, 2)
    assert cases.equal(first, other)
    assert not torch.equal(mine[0], theirs[0])
    again = run_ranks(work, 2)
    assert cases.equal(again[0][0], first)
    assert cases.equal(again[1][1], theirs)


def test_batchnorm_is_evaluated_with_one_rank_s_statistics() -> None:
    """Each rank's running means differ; evaluation must not depend on who evaluates what."""

    def work() -> Any:
        def normed() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

        options = cases.quiet(global_batch=12, epochs=1, drop_last=True, eval_data=cases.data(37))
        trainer = instep.Trainer(normed, cases.sgd, cases.data(61), **options)
        end = trainer.fit()
        with torch.no_grad():
            trainer.model.eval()
            x, y = cases.data(37).tensors
            return end.results["loss"], float(cross_entropy(trainer.model(x), y))

    results = run_ranks(work, 3)
    for got, by_hand in results:
        assert got == results[0][0]
        assert got == pytest.approx(by_hand, abs=1e-6)
