"""Asked to end: R13, the time limit, exit code 75, and going on afterwards."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import instep
from instep.errors import TrainError
from instep.train.preemption import SAME_S, seconds
from tests.harness import RankDiedError, run_job, run_ranks
from tests.launch.jobs import Place
from tests.train import cases

if TYPE_CHECKING:
    from pathlib import Path


class Signalled(instep.train.Callback):
    """Sends signals to this very process, at chosen steps; in the backward pass, or while a checkpoint is saved."""

    def __init__(self, plan: dict[int, list[tuple[int, int, str]]]) -> None:
        self.mine = plan.get(instep.rank(), [])
        self.step = 0

    def send(self, where: str) -> None:
        for step, number, place in self.mine:
            if step == self.step and place == where:
                self.mine = [one for one in self.mine if one != (step, number, place)]
                os.kill(os.getpid(), number)

    def on_step_end(self, trainer: instep.Trainer) -> None:
        self.step = trainer.progress.step
        self.send("step")

    def state_dict(self) -> dict[str, Any]:
        self.send("save")
        return {"here": True}


def train(folder: Any, plan: dict[int, list[tuple[int, int, str]]], **options: Any) -> Any:
    signalled = Signalled(plan)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Any) -> Any:  # noqa: ARG004
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
            signalled.send("backward")
            return gradients[0]

    def step(model: Any, batch: Any) -> Any:
        apply: Any = Backward.apply
        return apply(cross_entropy(model(batch[0]), batch[1]))

    given = cases.quiet(global_batch=8, epochs=6, training_step=step, loss=None) | options
    checkpoints = instep.train.Checkpoints(folder=folder, every_steps=10, every_epochs=None)
    trainer = instep.Trainer(
        cases.net, cases.adamw, cases.data(64), callbacks=[signalled], checkpoint=checkpoints, resume="auto", **given
    )
    try:
        end = trainer.fit()
    except instep.train.Preempted as ended:
        handler = signal.getsignal(signal.SIGTERM)  # as before
        name = ended.path and handler == signal.SIG_DFL and ended.path.name
        return ended.code, trainer.progress.step, name, ended.reason
    return 0, end.step, cases.weights(trainer), end.reason


TERM, USR1, USR2, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({1: [(5, TERM, "step")]}, "SIGTERM (rank 1)"),
        ({1: [(5, USR1, "backward")]}, "SIGUSR1 (rank 1)"),
        ({1: [(10, USR2, "save")]}, "SIGUSR2 (rank 1)"),
        ({0: [(7, INT, "step")], 1: [(5, INT, "step")]}, "SIGINT (rank "),
    ],
    ids=["one rank", "in the backward pass", "in a save", "at different steps"],
)
def test_R13_signals(tmp_path: Path, plan: Any, reason: str) -> None:
    whole = run_ranks(train, 2, tmp_path / "whole", {})
    job = run_job(train, 2, tmp_path / "cut", plan)
    (code, step, name, why), second = job.values
    assert (code, step, name, why) == second
    assert code == 75
    assert name == f"step-{step}"
    assert why.startswith(reason)
    assert (tmp_path / "cut" / name / "manifest.json").exists()
    assert f"saved {tmp_path / 'cut' / name} at step {step}" in "".join(job.outputs)
    rest = run_ranks(train, 2, tmp_path / "cut", {})
    assert [one[1] for one in rest] == [48, 48]
    assert cases.equal(rest[0][2], whole[0][2])


def test_R13_a_second_signal_ends_it(tmp_path: Path) -> None:
    def work() -> Any:
        @instep.train.on("step_end")
        def twice(trainer: instep.Trainer) -> None:
            if instep.rank() == 1 and trainer.progress.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # Slurm and the launcher may both send it
                time.sleep(SAME_S + 0.1)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)

        options = cases.quiet(global_batch=8, epochs=6, checkpoint=tmp_path / "c")
        instep.Trainer(cases.net, cases.adamw, cases.data(64), callbacks=[twice], **options).fit()

    with pytest.raises(RankDiedError, match="SIGTERM"):
        run_ranks(work, 2)


def test_the_time_limit_saves_and_ends(tmp_path: Path) -> None:
    def work() -> Any:
        options = {"max_time": 1, "epochs": 1_000_000, "steps": None}
        return train(tmp_path / "c", {}, **options)

    for code, _, _, reason in run_ranks(work, 2):
        assert code == 75
        assert reason.startswith("max_time of 1 s")


def test_without_checkpoints_a_signal_is_what_it_always_was() -> None:
    def work() -> Any:
        options = cases.quiet(global_batch=8, epochs=1)
        found = []

        @instep.train.on("step_end")
        def look(trainer: instep.Trainer) -> None:
            found.append(signal.getsignal(signal.SIGTERM))

        instep.Trainer(cases.net, cases.adamw, cases.data(8), callbacks=[look], **options).fit()
        return found

    assert run_ranks(work, 1) == [[signal.SIG_DFL]]


@pytest.mark.parametrize(
    ("given", "found"), [("23:50:00", 85_800), ("1-00:00:30", 86_430), ("50:00", 3000), (12.5, 12.5), (None, None)]
)
def test_time_limits(given: Any, found: float | None) -> None:
    assert seconds(given) == found


@pytest.mark.parametrize("given", ["tomorrow", "10", -1, 0, float("nan"), True, "1:2:3:4"])
def test_bad_time_limits(given: Any) -> None:
    with pytest.raises(TrainError, match="max_time"):
        seconds(given)


SCRIPT = """
    import sys
    from pathlib import Path
    import torch, instep
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    @instep.train.on("step_end")
    def tell(trainer):
        if trainer.progress.step == 20:
            Path(f"ready{trainer.session.rank}").touch()

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    instep.Trainer(
        lambda: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, 0.01), TensorDataset(x, x.sum(1, keepdim=True)),
        loss=mse_loss, global_batch=8, steps=int(sys.argv[1]), checkpoint="checkpoints", resume="auto", callbacks=[tell],
    ).fit()
"""


def test_under_instep_run_the_run_is_preempted_and_goes_on(tmp_path: Path) -> None:
    """A user's Ctrl-C, or Slurm's SIGTERM, at the launcher."""
    place = Place(tmp_path, torch=True)
    place.write("train.py", SCRIPT)
    with place.started("--nproc", 2, "--name", "one", "train.py", 1_000_000_000) as run:
        run.wait_for("ready0", "ready1")
        run.signal(signal.SIGTERM)
        assert run.end() == 75
        assert "preempted" in run.err
        assert "Traceback" not in run.err
    record = place.record()
    assert (record["outcome"], record["exit_code"], record["exit_codes"]) == ("preempted", 75, {"0": 75, "1": 75})
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    done = place.run("--nproc", 2, "--name", "two", "train.py", saved + 10)
    assert done.rc == 0
    assert f"after step {saved}" in done.out
