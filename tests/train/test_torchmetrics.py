"""Metrics of torchmetrics on 1 to 3 ranks, beside one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import instep
from instep.train.evaluation import evaluate
from tests.harness import run_ranks
from tests.train.outputs import CLASSES, samples, scores_and_classes

torchmetrics: Any = pytest.importorskip("torchmetrics")

SIZES = (2, 3, 5, 13)  # over three ranks: none for some, and unequal numbers


def metrics() -> dict[str, Any]:
    tm: Any = pytest.importorskip("torchmetrics")
    of_classes = tm.classification

    class Places(tm.CatMetric):  # type: ignore[misc]
        """What it kept, weighted by place: the order of the samples matters."""

        def update(self, _outputs: Any, targets: Any) -> None:
            super().update(targets.double())

        def compute(self) -> Any:
            value = super().compute().reshape(-1)
            return (value * torch.arange(1, len(value) + 1)).sum()

    def regression(kind: Any) -> Any:
        class Regression(kind):  # type: ignore[misc]
            def update(self, outputs: Any, targets: Any) -> None:
                super().update(outputs[:, 0], targets.double())

        return Regression()

    return {
        "accuracy": of_classes.MulticlassAccuracy(CLASSES, average="micro"),
        "f1": of_classes.MulticlassF1Score(CLASSES),
        "auroc": of_classes.MulticlassAUROC(CLASSES),
        "mse": regression(tm.MeanSquaredError),
        "pearson": regression(tm.PearsonCorrCoef),
        "r2": regression(tm.R2Score),
        "places": Places(),
        "sum": of_classes.MulticlassAccuracy(CLASSES) + of_classes.MulticlassF1Score(CLASSES),
        "best": tm.MinMaxMetric(of_classes.MulticlassAccuracy(CLASSES)),
        "all": tm.MetricCollection([of_classes.MulticlassPrecision(CLASSES), of_classes.MulticlassRecall(CLASSES)]),
    }


def one_process(size: int) -> dict[str, float]:
    found: dict[str, float] = {"rows": size}
    outputs, targets = scores_and_classes(samples(size).tensors)
    for name, metric in metrics().items():
        for start in range(0, size, 2):
            metric.update(outputs[start : start + 2], targets[start : start + 2])
        value = metric.compute()
        found |= (
            {f"{name}/{key}": float(one) for key, one in value.items()}
            if isinstance(value, dict)
            else {name: float(value)}
        )
    return found


def count(outputs: Any, _targets: Any) -> int:
    return len(outputs)


def work() -> list[dict[str, float]]:
    warnings.simplefilter("ignore")
    found = []
    for size in SIZES:
        own: dict[str, Any] = {"rows": count, **metrics()}
        found.append(evaluate(scores_and_classes, instep.shard(samples(size), batch_size=2), metrics=own))
        accuracy = own["accuracy"]
        assert accuracy.update_count == 0, "the user's object is as new"
        assert not accuracy._is_synced
        assert accuracy._to_sync
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_R2_torchmetrics_equal_one_process(nproc: int) -> None:
    for results in run_ranks(work, nproc, limit_s=120):
        for mine, theirs in zip(results, map(one_process, SIZES), strict=True):
            if theirs["rows"] < 5:  # torchmetrics itself loses the deviation of ranks that have one sample each
                del mine["pearson"], theirs["pearson"]
            assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
            assert {name: mine[name] for name in ("accuracy", "places")} == {
                name: theirs[name] for name in ("accuracy", "places")
            }


def test_a_collection_keeps_the_names_in_it() -> None:
    def twice() -> Any:
        warnings.simplefilter("ignore")
        collection = metrics()["all"]
        loader = instep.shard(samples(5), batch_size=1)
        first = evaluate(scores_and_classes, loader, metrics=collection)
        assert evaluate(scores_and_classes, loader, metrics=collection) == first
        return first

    first, other = run_ranks(twice, 2, limit_s=60)
    assert sorted(first) == ["MulticlassPrecision", "MulticlassRecall"]
    assert other == first


def test_a_metric_that_does_not_say_how_it_merges_is_named() -> None:
    class Own:
        def update(self, *_: Any) -> None: ...

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None: ...

    with pytest.raises(instep.InstepError, match="does not say how its counts are merged"):
        evaluate(scores_and_classes, instep.shard(samples(3), 1), metrics={"own": Own()})
