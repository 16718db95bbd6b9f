"""evaluate() and predict() on 1 to 4 ranks, beside one process."""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

import instep
from instep.errors import StepError, TrainError
from instep.train.evaluation import evaluate
from instep.train.metrics import Accuracy, Mean, Metric
from instep.train.prediction import predict
from tests.harness import run_command, run_ranks
from tests.train.outputs import KINDS, Outputs, model, plainly, samples, scores, scores_and_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

cross_entropy = nn.functional.cross_entropy


def disagreement(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """No mean over samples, and the order matters: nothing but all of them in order gives it."""
    wrong = (outputs.argmax(1) != targets).double()
    return float((wrong * torch.arange(1, len(wrong) + 1)).sum() ** 0.5 + 100 * len(wrong))


def samplers() -> dict[str, Any]:
    data = samples(10)
    return {
        "subset": (data, SubsetRandomSampler([1, 2, 3, 5, 7, 8, 9])),
        "weighted": (data, WeightedRandomSampler([float(weight) for weight in range(1, 11)], 13)),
        **{f"first {size}": (samples(size), None) for size in (1, 3, 5, 7, 10, 13)},
    }


def evaluations() -> dict[str, Any]:
    """All cases of R2 on this many ranks."""
    found: dict[str, Any] = {}
    metrics = {"accuracy": Accuracy(), "top2": Accuracy(top_k=2), "disagreement": disagreement}
    for name, (data, sampler) in samplers().items():
        for size in (1, 2, 4):
            loader = instep.shard(DataLoader(data, batch_size=size, sampler=sampler))
            results = evaluate(scores_and_classes, loader, loss=cross_entropy, metrics=metrics)
            numbers = predict(lambda batch: batch[2], loader, ranks="all")
            found[f"{name} by {size}"] = results, numbers.tolist()
    return found


def predictions() -> dict[str, Any]:
    """All kinds of outputs on this many ranks; only the main one gets them."""
    loaders = {size: instep.shard(samples(size), batch_size=2) for size in (2, 7)}
    return {
        f"{kind}, {size}": plainly(predict(forward, loader))
        for size, loader in loaders.items()
        for kind, forward in KINDS.items()
    }


@functools.cache
def on_ranks(work: Callable[[], Any], nproc: int) -> list[Any]:
    return run_ranks(work, nproc, limit_s=120)


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_R2_evaluation_equals_one_process(nproc: int) -> None:
    first, *others = on_ranks(evaluations, nproc)
    assert all(other == first for other in others)
    for case, (results, numbers) in first.items():
        name = case.partition(" by ")[0]
        if name.startswith("first"):
            assert numbers == list(range(int(name.split()[1])))
        elif name == "subset":
            assert sorted(numbers) == [1, 2, 3, 5, 7, 8, 9]
        else:
            assert len(numbers) == 13
        data, _ = samplers()[name]
        outputs, targets = scores_and_classes([one[numbers] for one in data.tensors])
        assert results == {
            "loss": pytest.approx(float(cross_entropy(outputs, targets)), rel=1e-12),
            "accuracy": float((outputs.argmax(1) == targets).sum()) / len(targets),
            "top2": float((outputs.topk(2).indices == targets[:, None]).any(1).sum()) / len(targets),
            "disagreement": disagreement(outputs, targets),
        }


def test_R2_order_is_that_of_one_process_with_any_sampler() -> None:
    orders = [
        {case: numbers for case, (_, numbers) in on_ranks(evaluations, nproc)[0].items()} for nproc in (1, 2, 3, 4)
    ]
    assert orders == [orders[0]] * 4


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_R2_all_kinds_of_outputs_come_back_in_dataset_order(nproc: int) -> None:
    main, *others = run_ranks(predictions, nproc, limit_s=120)
    assert all(set(map(type, other.values())) == {type(None)} for other in others)
    for case, found in main.items():
        kind, size = case.split(", ")
        expected = KINDS[kind](samples(int(size)).tensors)
        assert found == plainly(torch.as_tensor(expected) if kind == "numpy" else expected), case


class Nested(Dataset[Any]):
    """What default_collate makes a list of."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return index, (index, float(index))


def odd_cases() -> dict[str, Any]:
    """What is not one tensor row per sample, and loaders of all kinds."""
    found: dict[str, Any] = {}
    numbers = torch.arange(7)
    # Ranks see other batches than one process, and so other widths; still there is one row for each sample.
    ragged = predict(lambda batch: torch.ones(len(batch), 1 + int(batch.max())), instep.shard(numbers, 2), ranks="all")
    found["ragged"] = [len(row) for row in ragged]
    seen = {"equal": lambda outputs, targets: int((outputs == targets[0]).sum()), "sum": lambda _, both: sum(both[1])}
    found["nested"] = [evaluate(tuple, instep.shard(Nested(), size), metrics=seen) for size in (1, 2, 3)]
    # A number for the whole batch keeps its weight.
    seen = {"loss of rows": lambda outputs, _: outputs.loss.sum(), "rows": lambda outputs, _: len(outputs.scores)}
    found["number"] = evaluate(
        lambda batch: (Outputs(scores(batch), torch.tensor(2.0)), batch[1]), instep.shard(samples(5), 2), metrics=seen
    )
    loaders = {
        "own batches": instep.shard(DataLoader(samples(10), batch_sampler=[[3, 1], [0], [4, 5, 6], [2], [9, 8]])),
        "workers": instep.shard(samples(9), batch_size=2, num_workers=2),
        "any global batch": instep.shard(samples(9), global_batch=4),
        "stream": instep.shard(Stream(), batch_size=2),
        "stream, workers": instep.shard(Stream(), batch_size=2, num_workers=2),
    }
    for name, loader in loaders.items():
        found[name] = predict(lambda batch: batch[2], loader, ranks="all").tolist()
    # Tokens in place of samples: functions get all of them, but predict() cannot say whose they are.
    loader = instep.shard(numbers, batch_size=2)
    found["tokens"] = evaluate(
        lambda batch: (batch.repeat_interleave(2), None), loader, metrics={"rows": lambda outputs, _: len(outputs)}
    )
    found["whose tokens"] = told(lambda: predict(lambda batch: batch.repeat_interleave(2), loader))[1]
    return found


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples(9))


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_R2_outputs_and_loaders_of_other_kinds(nproc: int) -> None:
    for found in run_ranks(odd_cases, nproc, limit_s=120):
        assert found["ragged"] == {1: [2, 2, 4, 4, 6, 6, 7], 2: [3, 4, 3, 4, 7, 6, 7], 3: [4, 5, 6, 4, 5, 6, 7]}[nproc]
        assert found["nested"] == [{"equal": 5, "sum": 10.0}] * 3
        assert found["number"] == {"loss of rows": 10.0, "rows": 5}
        assert found["own batches"] == [3, 1, 0, 4, 5, 6, 2, 9, 8]
        for name in ("workers", "any global batch", "stream", "stream, workers"):
            assert found[name] == list(range(9)), name
        assert found["tokens"] == {"rows": 14}
        assert (
            "2 samples, and 4 outputs" in found["whose tokens"] or "1 samples, and 2 outputs" in found["whose tokens"]
        )


class Shards(IterableDataset[Any]):
    """A stream of its own for each rank, of unequal length; it does not say how long it is."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        rank = instep.rank()
        self.numbers = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor(float(number)) for number in self.numbers])


class Counted(Metric):
    def start(self) -> dict[str, Any]:
        return {"samples": 0, "by_class": torch.zeros(3, dtype=torch.int64)}

    def update(self, _outputs: Any, targets: Any) -> None:
        self.counts["samples"] += len(targets)
        self.counts["by_class"] += torch.bincount(targets.long() % 3, minlength=3)

    def compute(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {"samples": counts["samples"], "class_2": counts["by_class"][2]}


def test_R7_validation_with_unequal_streams() -> None:
    all_sizes = [(20, 14, 6), (0, 3, 0), (1, 0, 0), (0, 0, 9)]

    def together(batch: Any) -> Any:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)  # as a model in shards would
        assert everyone == 3
        return batch, batch, batch.mean()

    def apart(batch: Any) -> Any:
        return batch, batch, batch.mean()

    def work() -> Any:
        found = []
        for sizes in all_sizes:
            loader = instep.shard(Shards(sizes), batch_size=2, already_sharded=True)
            for forward in (apart, together):
                options: dict[str, Any] = {"collective_forward": forward is together}
                results = evaluate(forward, loader, metrics=[Counted(), Mean(lambda outputs, _: outputs)], **options)
                outputs = functools.partial(lambda one, batch: one(batch)[0], forward)
                numbers = predict(outputs, loader, ranks="all", **options)
                found.append((results, numbers.tolist()))
        return found

    for found in run_ranks(work, 3, limit_s=60):
        for number, (results, numbers) in enumerate(found):
            size = sum(all_sizes[number // 2])
            assert results == {
                "loss": (size - 1) / 2,
                "counted/samples": size,
                "counted/class_2": size // 3,
                "mean": (size - 1) / 2,
            }
            assert numbers == list(range(size))


@pytest.mark.parametrize("nproc", [2, 3])
def test_R7_validation_of_a_sharded_model(nproc: int) -> None:
    def work() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded = model()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (nproc,)))
        sharded.eval()
        found = []
        for size in (1, 4 * nproc + 1):
            results = evaluate(
                lambda batch: (sharded(batch[0].double()), batch[1]),
                instep.shard(samples(size), batch_size=2),
                loss=cross_entropy,
                metrics=Accuracy(),
                collective_forward=True,
            )
            found.append((size, results))
        return found

    for found in run_ranks(work, nproc, limit_s=60):
        for size, results in found:
            outputs, targets = scores_and_classes(samples(size).tensors)
            assert results["accuracy"] == float((outputs.argmax(1) == targets).sum()) / len(targets)
            assert results["loss"] == pytest.approx(float(cross_entropy(outputs, targets)), rel=1e-12)


def test_R11_mean_loss_is_weighted_by_samples() -> None:
    def work() -> Any:
        value, count = ((1.0, 3), (6.0, 2))[instep.rank()]
        loader = instep.shard([value] * count, batch_size=5, already_sharded=True)
        return evaluate(lambda batch: (batch, batch, batch.mean()), loader, metrics=Mean(lambda outputs, _: outputs))

    assert run_ranks(work, 2) == [{"loss": 3.0, "mean": 3.0}] * 2


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_R11_mean_loss_by_tokens(nproc: int) -> None:
    lengths = [5, 1, 0, 2, 7, 0, 3]

    def forward(batch: Any) -> Any:
        tokens = torch.cat([torch.arange(float(number)) for number in batch])
        return None, None, tokens.mean()  # NaN where there is no token

    def work() -> Any:
        loader = instep.shard(lengths, batch_size=1)
        tensor = evaluate(forward, loader, weight=lambda batch: batch.sum())
        number = evaluate(forward, loader, weight=lambda batch: int(batch.sum()))
        assert tensor == number
        return number

    tokens = [token for length in lengths for token in range(length)]
    assert run_ranks(work, nproc) == [{"loss": sum(tokens) / len(tokens)}] * nproc


# --- failures


def told(function: Callable[[], Any]) -> tuple[str, str]:
    """What a rank raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", ""


PLACES = ["forward", "loss", "metric", "function", "loader", "move"]


def test_a_failure_on_one_rank_ends_all() -> None:
    def run(where: str, *, collective: bool) -> tuple[str, str]:
        def fail(place: str) -> None:
            if place == where and (instep.rank() == 1 or where == "function"):
                raise ZeroDivisionError(f"bad {place}")

        class Data(Dataset[Any]):
            def __len__(self) -> int:
                return 7

            def __getitem__(self, index: int) -> Any:
                fail("loader")
                return torch.tensor(float(index))

        def forward(batch: Any) -> Any:
            fail("forward")
            if collective:
                dist.all_reduce(torch.ones(1))
            return batch, batch

        def loss(outputs: Any, targets: Any) -> Any:
            fail("loss")
            return (outputs - targets).mean()

        class Failing(Counted):
            def update(self, outputs: Any, targets: Any) -> None:
                fail("metric")
                super().update(outputs, targets)

        def function(outputs: Any, targets: Any) -> int:
            fail("function")
            return len(outputs) + len(targets)

        def move(batch: Any) -> Any:
            fail("move")
            return batch

        return told(
            lambda: evaluate(
                forward,
                instep.shard(Data(), batch_size=2),
                loss=loss,
                metrics={"failing": Failing(), "function": function},
                move=move,
                collective_forward=collective,
            )
        )

    def work() -> Any:
        apart = {where: run(where, collective=False) for where in PLACES}
        # Inside of a collective forward nobody can be told: see the next test.
        return apart, {where: run(where, collective=True) for where in PLACES if where != "forward"}

    for rank, both in enumerate(run_ranks(work, 3, limit_s=60)):
        for found in both:
            for where, (kind, text) in found.items():
                culprit = 0 if where == "function" else 1
                if rank == culprit:
                    assert (kind, text) == ("ZeroDivisionError", f"bad {where}")
                else:
                    assert kind == "StepError"
                    assert f"rank {culprit} failed with ZeroDivisionError: bad {where}" in text
                    assert "in fail" in text


def test_a_failure_inside_of_a_collective_forward_ends_the_job() -> None:
    def forward(batch: Any) -> Any:
        if instep.rank() == 1:
            raise ZeroDivisionError("bad forward")
        dist.all_reduce(torch.ones(1))
        return batch, batch

    def work() -> Any:
        return evaluate(forward, instep.shard(torch.arange(6.0), 1), metrics=Counted(), collective_forward=True)

    # The others lose their connection to it; the launcher shows the rank that failed first.
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        run_ranks(work, 2)


def test_a_failing_metric_fails_the_job() -> None:
    def function(_outputs: Any, _targets: Any) -> int:
        raise ZeroDivisionError("no F1 of nothing")

    def work() -> Any:
        return evaluate(lambda b: (b, b), instep.shard(torch.arange(6.0), 1), metrics={"f1": function})

    with pytest.raises((ZeroDivisionError, StepError), match="no F1 of nothing"):
        run_ranks(work, 2)


def test_collectives_in_a_metric_are_refused() -> None:
    def ours(outputs: Any, _: Any) -> Any:
        return instep.mean(outputs.mean(), len(outputs))

    def torchs(outputs: Any, _: Any) -> Any:
        dist.all_reduce(outputs)
        return outputs.mean()

    def work() -> Any:
        loader = instep.shard(torch.arange(6.0), batch_size=1)
        calls = [functools.partial(evaluate, itself, loader, metrics={"own": one}) for one in (ours, torchs)]
        return [told(call) for call in calls]

    for found in run_ranks(work, 2):
        assert all("the metric own" in text for _, text in found)


SCRIPT = """
    import torch
    import instep
    from instep.train.evaluation import evaluate
    from instep.train.metrics import Mean

    def value(outputs, targets):
        if instep.rank() == 1:
            raise ZeroDivisionError("no score of nothing")
        return outputs

    with instep.init():
        evaluate(lambda batch: (batch, batch), instep.shard(torch.arange(6.0), 1), metrics=Mean(value))
"""


def test_a_job_whose_metric_fails_on_one_rank_shows_one_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "instep", "run", "--nproc", "3", "--device", "cpu", str(script)]
    result = run_command(command, cwd=tmp_path, limit_s=100)
    shown = result.out + result.err
    assert result.rc == 1, shown
    assert len(re.findall(r"rank 1 on \S+ failed: ZeroDivisionError: no score of nothing", shown)) == 1, shown
    assert shown.count("Traceback") == 1, shown


# --- bad input


def itself(batch: Any) -> Any:
    return batch, batch


def wrong(forward: Any = itself, loader: Any = True, **options: Any) -> str:
    data = instep.shard([1.0, 2.0, 3.0], batch_size=2) if loader is True else loader
    kind, text = told(lambda: evaluate(forward, data, **options))
    assert kind == "TrainError", text
    return text


def gives(value: Any) -> Callable[[Any, Any], Any]:
    return lambda _outputs, _targets: value


def mean_of(outputs: torch.Tensor, _targets: Any) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loader": None, "metrics": Counted()}, "needs data"),
        ({"metrics": {"none": gives(None)}}, "The metric none gives no number"),
        ({"metrics": {"five": gives(torch.zeros(5))}}, "Tensor of shape [5]"),
        ({"metrics": {"text": gives("0.5")}}, "'0.5'"),
        ({"loss": lambda outputs, _: outputs}, "no single number"),
        ({"loss": gives(None), "forward": lambda b: (b, b, "x")}, "no single number"),
        ({"loss": mean_of, "metrics": {"loss": Counted()}}, "as the mean loss is"),
        ({"metrics": 5}, "This is no metric"),
        ({"metrics": {"a": 5}}, "This is no metric: a"),
        ({"metrics": {"a": Accuracy}}, "Accuracy(...)"),
        ({"metrics": {3: Counted()}}, "a name is a text"),
        ({"metrics": [Counted(), Counted()]}, "Two metrics are called 'counted'"),
        ({"metrics": gives(1)}, "no name"),
        ({"forward": lambda b: b, "metrics": Counted()}, "neither (outputs, targets)"),
        ({"forward": lambda b: (b, b[:1]), "metrics": {"a": gives(1)}}, "one row for each sample"),
        ({"forward": lambda b: (["a"], b), "metrics": {"a": gives(1)}}, "list of 1"),
        ({}, "nothing to evaluate"),
        ({"forward": lambda b: (b, b, None)}, "nothing to evaluate"),
        ({"metrics": {"a": gives({"b": 1}), "a/b": gives(1)}}, "Two figures are called 'a/b'"),
        ({"loss": mean_of, "weight": lambda _: 0}, "weigh nothing"),
        ({"metrics": Accuracy()}, "Accuracy needs classes"),
        ({"metrics": Mean(mean_of)}, "one number for the whole batch"),
        ({"loader": iter([]), "metrics": Counted()}, "no rank got a batch"),
        ({"forward": lambda b: (b if b[0] > 2 else {"a": b}, b), "metrics": {"a": gives(1)}}, "not of one kind"),
        ({"forward": lambda b: (b, b, b.mean() if b[0] > 2 else None)}, "some have none"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    assert words in wrong(**options)


def test_bad_input_alike_on_all_ranks() -> None:
    def work() -> Any:
        empty = instep.shard(Shards((0, 0)), batch_size=2, already_sharded=True)
        return [
            wrong(loader=DataLoader(samples(3), batch_size=2), metrics=Counted()),
            wrong(loader=instep.shard([1.0], 1, rank=0, world_size=1), metrics=Counted()),
            wrong(loader=empty, metrics=Counted()),
            wrong(loader=empty, metrics=Counted(), collective_forward=True),
            wrong(metrics={"a": 5}),
        ]

    for unsharded, other_world, no_data, no_data_in_step, no_metric in run_ranks(work, 2):
        assert "see every sample 2 times" in unsharded
        assert "loader of this world" in other_world
        assert "no rank got a batch" in no_data
        assert "no rank got a batch" in no_data_in_step
        assert "This is no metric" in no_metric


# --- alone


def test_a_plain_loader_in_a_world_of_one() -> None:
    loader = DataLoader(samples(5), batch_size=2)
    assert evaluate(scores_and_classes, loader, metrics={"rows": lambda outputs, _: len(outputs)}) == {"rows": 5}
    assert predict(lambda batch: batch[2], loader).tolist() == list(range(5))


def test_every_evaluation_sees_the_same_samples_without_gradients() -> None:
    loader = instep.shard(samples(6), batch_size=2, shuffle=True)
    loader.epoch = 3
    layer = model()

    def forward(batch: Any) -> Any:
        assert not torch.is_grad_enabled()
        return layer(batch[0].double()), batch[1]

    first = evaluate(forward, loader, loss=cross_entropy, metrics={"order": disagreement})
    assert evaluate(forward, loader, loss=cross_entropy, metrics={"order": disagreement}) == first
    assert torch.is_grad_enabled()
    assert loader.epoch == 3


def test_predict_names_ranks_that_do_not_exist() -> None:
    with pytest.raises(TrainError, match="does not know ranks"):
        predict(scores, instep.shard(samples(3), 1), ranks="some")  # type: ignore[arg-type]


def test_over_a_group_of_plain_torch() -> None:
    def work() -> Any:
        metrics = {"sum": lambda _, targets: int(targets.sum())}
        return evaluate(scores_and_classes, instep.shard(samples(5), batch_size=1), metrics=metrics)

    expected = int(samples(5).tensors[1].sum())
    assert run_ranks(work, 2, join="torch") == [{"sum": expected}] * 2
