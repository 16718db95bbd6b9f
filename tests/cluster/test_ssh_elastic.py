"""Machines are lost, and the run goes on: with those that are left, or with a spare one; the training as if nothing was."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tests.cluster.ssh_jobs import options, place_on, ready, seconds_until_gone

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox

# Waits in the first round, and ends in the second.
ROUNDS = """
    import os, time
    from pathlib import Path
    rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(f"ready{rank}" if again == "0" else f"again{rank}").touch()
    print(os.uname().nodename, rank, os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    time.sleep(600 if again == "0" else 0)
"""


def test_the_run_goes_on_with_the_machines_that_are_left(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", ROUNDS)
    words = [*options(sandbox), "--nodes", "2:3", "--max-restarts", "1", "train.py"]
    with place.started(*words) as run:
        job = ready(run, 3)
        sandbox.kill("n3")
        assert run.end() == 0, run.err
        seconds_until_gone(job, time.monotonic())
        assert "✗ n3 is out of reach" in run.err or "✗ the connection to n3 has ended" in run.err
        assert "↻ restart 1 of 1 in 1 s; looking for n3\n" in run.err
    record = place.record()
    assert (record["outcome"], record["restarts"], record["hosts"], record["world_size"]) == (
        "finished", 1, ["n1", "n2"], 2,
    )  # fmt: skip
    first, mark, second = place.log(0).splitlines()
    assert (first, second) == ("n1 0 3 1", "n1 0 2 1")
    assert mark.startswith("--- restart 1 of 1: ")


def test_a_spare_machine_steps_in(sandbox: Sandbox) -> None:
    """The first one is lost, where the ranks met; the ranks are numbered anew, in the order of the list."""
    place = place_on(sandbox)
    place.write("train.py", ROUNDS)
    words = [*options(sandbox), "--nodes", "2", "--max-restarts", "3", "train.py"]
    with place.started(*words) as run:
        ready(run, 2)
        sandbox.kill("n1")
        assert run.end() == 0, run.err
    record = place.record()
    assert (record["restarts"], record["hosts"]) == (1, ["n2", "n3"])
    assert [place.log(rank).splitlines()[-1] for rank in (0, 1)] == ["n2 0 2 3", "n3 1 2 3"]


def test_too_few_machines_are_left(sandbox: Sandbox) -> None:
    place = place_on(sandbox)
    place.write("train.py", ROUNDS)
    words = [*options(sandbox), "--nodes", "3", "--max-restarts", "1", "--node-wait", "3", "train.py"]
    with place.started(*words) as run:
        job = ready(run, 3)
        sandbox.kill("n2")
        assert run.end() == 2, run.err
        seconds_until_gone(job, time.monotonic())
        assert "✗ 2 of the 3 machines that are needed answer; missing: n2\n" in run.err
    record = place.record()
    assert (record["outcome"], record["exit_code"], record["restarts"]) == ("failed", 2, 0)


TRAINER = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset
    import instep

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(61, 6, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
    folder, step_s = sys.argv[1], float(sys.argv[2])

    @instep.train.on("step_end")
    def linger(trainer):
        if instep.rank() == 0:
            Path(f"{folder}-step").write_text(str(trainer.progress.step))
        if trainer.progress.step == 12:
            Path(f"ready{instep.rank()}").touch()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.progress.step == 22 and instep.rank() == 1 and sys.argv[3:] == ["die"]:
            os.kill(os.getpid(), 9)
        time.sleep(step_s)

    began = []

    @instep.train.on("fit_start")
    def note(trainer):
        began.append(trainer.progress.step)

    trainer = instep.Trainer(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4)),
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        data, loss=cross_entropy, global_batch=6, steps=40, schedule="cosine", callbacks=[linger, note],
        checkpoint=instep.train.Checkpoints(folder=folder, every_steps=5, every_epochs=None), resume="auto",
        progress=False, summary=False,
    )
    end = trainer.fit()
    if instep.rank() == 0:
        torch.save([one.detach().clone() for one in trainer.model.parameters()], f"{folder}.pt")
        print(*began, end.step, instep.world_size())
"""


def test_the_training_loses_and_repeats_no_sample(sandbox: Sandbox) -> None:
    """After a machine was lost, on two machines then, the weights are those of a run that nothing happened to."""
    import torch

    place = place_on(sandbox, torch=True)
    place.write("train.py", TRAINER)
    words = [*options(sandbox), "--device", "cpu"]
    with place.started(*words, "--nodes", "2:3", "--max-restarts", "1", "train.py", "cut", "0.1", limit_s=90) as run:
        job = ready(run, 3)
        sandbox.kill("n2")
        assert run.end() == 0, run.err
        seconds_until_gone(job, time.monotonic())
    began, end, world = place.log(0).split()[-3:]
    assert (end, world) == ("40", "2")
    assert int(began) >= 10
    assert place.record()["hosts"] == ["n1", "n3"]
    place.run("--nproc", 3, "--name", "whole", "--device", "cpu", "train.py", "whole", "0", limit_s=90).ok()
    cut, whole = (torch.load(place.path / f"{name}.pt") for name in ("cut", "whole"))
    for one, other in zip(cut, whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_started_again_with_all_machines_the_weights_are_the_same_to_the_bit(sandbox: Sandbox) -> None:
    import torch  # a sum of two is the same in any order; of three it depends on the buckets that DDP makes anew

    place = place_on(sandbox, torch=True)
    place.write("train.py", TRAINER)
    words = [*options(sandbox), "--device", "cpu", "--nodes", "2", "--max-restarts", "1", "--name", "cut"]
    result = place.run(*words, "train.py", "cut", "0", "die", limit_s=90).ok()
    assert "✗ rank 1 on n2 failed: killed by signal 9" in result.err
    assert result.out in {"15 40 2\n", "20 40 2\n"}, "the last checkpoint was whole, or still being written"
    assert json.loads((place.path / "runs/cut/run.json").read_text())["hosts"] == ["n1", "n2"]
    place.run("--nproc", 2, "--name", "whole", "--device", "cpu", "train.py", "whole", "0", limit_s=90).ok()
    cut, whole = (torch.load(place.path / f"{name}.pt") for name in ("cut", "whole"))
    for one, other in zip(cut, whole, strict=True):
        assert torch.equal(one, other)
