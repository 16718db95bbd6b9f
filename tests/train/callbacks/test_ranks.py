"""A callback of the main rank that asks for the other ranks: an error at once, that names it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import StepError, TrainError
from instep.train.events import Callback, Events, on
from tests.harness import run_command, run_ranks
from tests.train.callbacks.toy import data, trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sum_up(training: Any) -> None:
    dist.all_reduce(torch.ones(1))


def run_the_wrapped(training: Any) -> None:
    out = training.wrapped(data().tensors[0])
    out.sum().backward()  # without buffers, DDP talks in the backward pass


LONELY: dict[str, Callable[[Any], Any]] = {
    "agree": lambda _: instep.agree(True, "any"),
    "barrier": lambda _: instep.barrier(),
    "all_reduce": sum_up,
    "DDP": run_the_wrapped,
}


@pytest.mark.parametrize(
    ("event", "how"),
    [("step_end", "agree"), ("report", "barrier"), ("fit_start", "all_reduce"), ("evaluate_end", "DDP")],
)
def test_R4_a_collective_on_the_main_rank_alone_is_an_error_that_names_the_callback(event: str, how: str) -> None:
    def work() -> None:
        class Greedy(Callback):
            ranks = "main"

        setattr(Greedy, f"on_{event}", lambda _, training, *__: LONELY[how](training))
        trainer([Greedy()], eval_data=data(), log_every=2).fit()

    started = time.monotonic()
    with pytest.raises(StepError, match=rf"Greedy\.on_{event}\(\)") as caught:
        run_ranks(work, 2, limit_s=60)
    assert caught.value.rank == 0  # type: ignore[attr-defined]
    assert "ranks = 'all'" in caught.value.cure or "Move" in caught.value.cure
    assert time.monotonic() - started < 50  # not the time limit of a collective


def test_R4_a_wrapped_model_with_buffers_is_refused_in_its_forward_pass() -> None:
    def work() -> None:
        @on("step_end", ranks="main")
        def peek(training: Any) -> None:
            bare = torch.nn.BatchNorm1d(4)
            wrapped = DistributedDataParallel(bare) if not training.session.is_main else training.wrapped
            wrapped(data().tensors[0])

        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        trainer([peek], model).fit()

    with pytest.raises(StepError, match=r"peek\.on_step_end\(\)"):
        run_ranks(work, 2, limit_s=60)


def test_what_is_not_shared_is_allowed_on_the_main_rank() -> None:
    def work() -> list[float]:
        seen: list[float] = []

        @on("step_end", ranks="main", every=4)
        def look(training: Any) -> None:
            with torch.no_grad():
                seen.append(float(training.model(data().tensors[0]).mean()))

        trainer([look]).fit()
        return seen

    main, other = run_ranks(work, 2)
    assert len(main) == 3
    assert other == []


def test_events_come_in_order_and_callbacks_in_theirs() -> None:
    heard: list[str] = []

    class Echo(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

    def tell(event: str) -> Any:
        return lambda self, training, *_: heard.append(f"{self.name}.{event}@{training.progress.step}")

    for event in ("fit_start", "epoch_start", "step_end", "report", "evaluate_start", "evaluate_end", "fit_end"):
        setattr(Echo, f"on_{event}", tell(event))
    setattr(Echo, "on_epoch_end", tell("epoch_end"))  # noqa: B010
    trainer([Echo("a"), Echo("b")], eval_data=data(), epochs=1, log_every=2).fit()
    first = [one[2:] for one in heard if one.startswith("a.")]
    assert first == [one[2:] for one in heard if one.startswith("b.")]
    assert heard[:2] == ["a.fit_start@0", "b.fit_start@0"]
    assert first == [
        "fit_start@0",
        "epoch_start@0",
        "step_end@1",
        "step_end@2",
        "report@2",
        "step_end@3",
        "step_end@4",
        "report@4",
        "epoch_end@4",
        "evaluate_start@4",
        "evaluate_end@4",
        "fit_end@4",
    ]


def test_every_counts_optimizer_steps() -> None:
    steps: list[int] = []
    gradients: list[bool] = []

    @on("step_end", every=5)
    def note(training: Any) -> None:
        steps.append(training.progress.step)

    @on("gradients", every=3)
    def look(training: Any) -> None:
        gradients.append(all(one.grad is not None for one in training.model.parameters()))

    trainer([note, look]).fit()
    assert steps == [5, 10]
    assert gradients == [True] * 4


def test_an_exception_is_told_to_all_callbacks_and_raised() -> None:
    told: list[str] = []

    @on("exception")
    def note(training: Any, error: BaseException) -> None:
        told.append(str(error))

    @on("step_end", every=3)
    def fail(training: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer([fail, note]).fit()
    assert told == ["on purpose"]


def test_states_go_round_by_place_and_class() -> None:
    class Counter(Callback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    one, two = Counter(), Counter()
    one.count, two.count = 3, 4
    states = Events([one, Callback(), two], is_main=True).state_dict()
    assert states == {"0.Counter": {"count": 3}, "2.Counter": {"count": 4}}
    three, four = Counter(), Counter()
    assert Events([three, Callback(), four], is_main=False).load_state_dict({**states, "5.Gone": {}}) == ["5.Gone"]
    assert (three.count, four.count) == (3, 4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (print, "no callback"),
        (type("Odd", (Callback,), {"ranks": "some"})(), "ranks that do not exist"),
        (type("Never", (Callback,), {"every": 0})(), "no number of steps"),
    ],
)
def test_what_is_no_callback_is_named(wrong: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        Events([wrong], is_main=True)


def test_an_event_that_does_not_exist_is_named() -> None:
    with pytest.raises(TrainError, match="step_begin"):
        on("step_begin")


SCRIPT = """
import torch, instep
from torch.utils.data import TensorDataset
from instep.train import Trainer, on

@on("report", ranks="main")
def greedy(training, report):
    instep.barrier()

with instep.init():
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    net = torch.nn.Linear(4, 1)
    loss = torch.nn.functional.mse_loss
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    Trainer(net, optimizer, data, loss=loss, global_batch=16, epochs=99, log_every=4, callbacks=[greedy]).fit()
"""


def test_R4_the_whole_job_ends_at_once_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # A process that is left behind fails run_command, and so does a job that hangs.
    done = run_command([sys.executable, "-m", "instep", "run", "--nproc", "2", "train.py"], cwd=tmp_path, limit_s=120)
    assert done.rc == StepError.exit_code, str(done)
    assert "greedy.on_report(), a callback of the main rank" in done.err
    assert "barrier" in done.err
