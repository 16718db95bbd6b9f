"""Metrics that count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from instep.errors import TrainError
from instep.train.metrics import Accuracy, Mean, Metric, figures, named
from tests.harness import run_ranks


def of(metric: Metric, *batches: tuple[Any, Any]) -> Any:
    metric.reset()
    for outputs, targets in batches:
        metric.update(outputs, targets)
    return metric.compute(metric.total())


SCORES = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.1, 0.6, 0.3], [0.4, 0.3, 0.3]])
CLASSES = torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize(("top_k", "expected"), [(1, 2 / 4), (2, 3 / 4), (3, 1.0)])
def test_accuracy_of_scores(top_k: int, expected: float) -> None:
    assert of(Accuracy(top_k), (SCORES[:3], CLASSES[:3]), (SCORES[3:], CLASSES[3:])) == expected


def test_accuracy_of_classes() -> None:
    assert of(Accuracy(), (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))) == 2 / 3


def test_accuracy_of_pixels_and_tokens() -> None:
    targets = torch.tensor([[0, 1], [2, 2]])
    tokens = torch.nn.functional.one_hot(torch.tensor([[0, 1], [2, 0]]), 3).float()  # [samples, tokens, classes]
    assert of(Accuracy(), (tokens, targets)) == 3 / 4
    assert of(Accuracy(), (tokens.movedim(-1, 1), targets)) == 3 / 4  # [samples, classes, pixels]
    ignoring = Accuracy(ignore_index=2)
    assert of(ignoring, (tokens, targets)) == 1.0
    assert ignoring.total() == {"right": 2, "all": 2}


def test_accuracy_of_nothing_is_no_number() -> None:
    assert math.isnan(of(Accuracy()))
    assert math.isnan(of(Mean(lambda outputs, _: outputs)))


@pytest.mark.parametrize(
    ("outputs", "targets", "words"),
    [
        (SCORES, CLASSES.float(), "no whole numbers"),
        (SCORES[0], CLASSES[:3], "cannot compare"),
        (SCORES, CLASSES[:3], r"outputs: torch.float32 \[4, 3\]"),
        ((SCORES,), CLASSES, "outputs: tuple"),
        (SCORES, None, "targets: NoneType"),
    ],
)
def test_accuracy_says_what_does_not_fit(outputs: Any, targets: Any, words: str) -> None:
    with pytest.raises(TrainError, match=words):
        of(Accuracy(), (outputs, targets))


def test_accuracy_with_more_guesses_than_classes() -> None:
    with pytest.raises(TrainError, match="fewer classes than top_k=4"):
        of(Accuracy(4), (SCORES, CLASSES))
    with pytest.raises(TrainError, match="no number of guesses"):
        Accuracy(0)


def test_mean_of_values() -> None:
    error = Mean(lambda outputs, targets: (outputs - targets).abs())
    assert (
        of(error, (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])), (torch.tensor([6.0]), torch.tensor([3.0]))) == 2
    )
    whole = Mean(lambda outputs, _: outputs)
    of(whole, (torch.tensor([2**60, 1]), None))
    assert whole.total() == {"sum": 2**60 + 1, "all": 2}
    with pytest.raises(TrainError, match="needs a function"):
        Mean(3)  # type: ignore[arg-type]


def test_whole_numbers_stay_whole_over_ranks() -> None:
    class Big(Metric):
        def start(self) -> dict[str, Any]:
            return {"count": 0, "by_class": torch.zeros(2, dtype=torch.int64), "sum": 0.0}

        def update(self, outputs: Any, _targets: Any) -> None:
            self.counts["count"] += outputs
            self.counts["by_class"][1] += outputs
            self.counts["sum"] += 0.1

        def compute(self, counts: dict[str, Any]) -> Any:
            return counts

    def work() -> Any:
        import instep

        metric = Big()
        metric.reset()
        if instep.rank():  # rank 0 has no data
            metric.update(2**62 + 1, None)
        counts = metric.total()
        return counts["count"], counts["by_class"].tolist(), counts["sum"]

    assert run_ranks(work, 2) == [(2**62 + 1, [0, 2**62 + 1], 0.1)] * 2


def test_names() -> None:
    def exact_match(_outputs: Any, _targets: Any) -> float:
        return 0.0

    class TopFive(Accuracy):
        pass

    assert list(named([Accuracy(), exact_match, TopFive()])) == ["accuracy", "exact_match", "top_five"]
    assert list(named(exact_match)) == ["exact_match"]
    assert named(None) == {}
    assert list(named({"a": Accuracy()})) == ["a"]


def test_figures() -> None:
    assert figures("a", torch.tensor([2])) == {"a": 2}
    assert isinstance(figures("a", torch.tensor([2]))["a"], int)
    assert figures("a", {"b": 1, "c": torch.tensor(0.5)}) == {"a/b": 1, "a/c": 0.5}
    assert figures("", {"b": 1}) == {"b": 1}
    numpy = pytest.importorskip("numpy")
    assert figures("a", numpy.float32(0.5)) == {"a": 0.5}
    assert figures("a", numpy.ones(1)) == {"a": 1.0}
    with pytest.raises(TrainError, match="ndarray of shape"):
        figures("a", numpy.ones(3))
    with pytest.raises(TrainError, match="a\\['b'\\] gives no number"):
        figures("a", {"b": [1.0]})
