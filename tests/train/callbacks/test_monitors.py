"""What is measured beside training: gradients, rates, throughput."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from instep.errors import TrainError
from instep.train.callbacks import GradientStats, LearningRates, Throughput
from instep.train.callbacks.throughput import excess_of
from instep.train.events import on
from instep.train.state import Report
from tests.harness import run_ranks
from tests.train.callbacks.toy import data, net, trainer


def test_norms_of_the_whole_gradients_on_any_number_of_ranks() -> None:
    def work() -> dict[str, float]:
        training = trainer([GradientStats(every=4)], epochs=1, log_every=4)
        training.fit()
        assert training.report is not None
        return training.report.values

    alone, (one, two) = work(), run_ranks(work, 2, limit_s=60)
    assert list(alone) == ["grad_norm", "grad_norm/0", "grad_norm/2"]
    assert one == two == pytest.approx(alone, rel=1e-4)
    assert alone["grad_norm"] == pytest.approx((alone["grad_norm/0"] ** 2 + alone["grad_norm/2"] ** 2) ** 0.5, rel=1e-5)


def test_the_norm_is_that_of_the_gradient() -> None:
    training = trainer([GradientStats(every=1, layers=False)], global_batch=64, epochs=1, log_every=1)
    training.fit()
    model = net()
    mse_loss(model(data().tensors[0]), data().tensors[1]).backward()
    wanted = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]).norm()
    assert training.report is not None
    assert training.report.values == {"grad_norm": pytest.approx(float(wanted), rel=1e-5)}


def test_the_rate_of_each_parameter_group() -> None:
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "name": "first", "lr": 0.1},  # type: ignore[index]
        {"params": list(model[2].parameters()), "lr": 0.01},  # type: ignore[index]
    ]
    training = trainer([LearningRates()], model, torch.optim.SGD(groups), epochs=1, log_every=4)
    training.fit()
    assert training.report is not None
    assert training.report.values == {"lr/first": 0.1, "lr/1": 0.01}


def test_excess_over_the_median_of_the_others() -> None:
    assert excess_of([0.1]) == [0.0]
    assert excess_of([0.1, 0.2]) == pytest.approx([-0.5, 1.0])
    assert excess_of([0.1, 0.1, 0.1, 0.15]) == pytest.approx([0, 0, 0, 0.5])
    assert excess_of([0.0, 0.0]) == [0.0, 0.0]


def heard(reports: list[tuple[float, ...]], capsys: pytest.CaptureFixture[str], wait: float = 0.0) -> list[str]:
    training: Any = SimpleNamespace(session=SimpleNamespace(hosts=("ant", "bee", "cat")))
    watch = Throughput(slower=0.2, reports=2)
    watch.on_fit_start(training)
    for number, step_s in enumerate(reports, 1):
        watch.on_report(training, Report(number, 0, 10 * number, number, 0.5, 0.1, 100.0, wait, step_s))
    return [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]


def test_a_slow_rank_is_named_once_for_each_stretch(capsys: pytest.CaptureFixture[str]) -> None:
    well, slow = (0.1, 0.1, 0.1), (0.1, 0.2, 0.1)
    assert heard([well, slow, well, slow, well], capsys) == []  # never twice in a row
    lines = heard([slow] * 5, capsys)
    assert len(lines) == 1
    assert "Rank 1 on bee is slow" in lines[0]
    assert "100% more" in lines[0]
    assert len(heard([slow, slow, slow, well, slow, slow, slow], capsys)) == 2


def test_waiting_for_data_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = heard([(0.1, 0.1, 0.1)] * 5, capsys, wait=0.6)
    assert len(lines) == 1
    assert "wait for data 60 %" in lines[0]


def test_a_rank_that_sleeps_is_found() -> None:
    """With real ranks: rank 1 takes its time in the forward pass, and the others wait for it."""

    class Sleepy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import time

            import instep

            if instep.rank() == 1:
                time.sleep(0.3)
            return self.inner(x)  # type: ignore[no-any-return]

    def work() -> int:
        slowest: list[int] = []

        @on("report")
        def note(training: Any, report: Report) -> None:
            slowest.append(report.slowest)

        trainer([note, Throughput(reports=2)], Sleepy(), epochs=2, log_every=4).fit()
        return slowest[-1]

    assert run_ranks(work, 2, limit_s=60) == [1, 1]


@pytest.mark.parametrize("wrong", [{"slower": 0}, {"waiting": 2}, {"reports": 0}])
def test_bad_wishes(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="Throughput"):
        Throughput(**wrong)
