"""A machine goes away, and the run goes on with a spare one, or says who is missing; training ends with the same weights."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.launch.agents.conftest import Machines
    from tests.launch.jobs import Place

# Waits in the first round, and ends in the second.
ROUNDS = """
    import os, time
    rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"ready{rank}" if again == "0" else f"again{rank}", "w")
    print(os.uname().nodename, rank, os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    time.sleep(600 if again == "0" else 0)
"""


def wait_for_ranks(place: Place, ranks: int) -> None:
    deadline = time.monotonic() + 20
    while not all((place.path / f"ready{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_spare_machine_steps_in(machines: Machines, place: Place) -> None:
    """The first one is lost, where the ranks met; the ranks are numbered anew, in the order of the list."""
    place.write("train.py", ROUNDS)
    words = ("--nodes", "2", "--max-restarts", "3", "train.py")
    with (
        machines.door(place, 0) as (config, sshd),
        machines.started(place, *words, names=("n1", "n2", "n3"), config=config) as launcher,
    ):
        wait_for_ranks(place, 2)
        sshd.kill()
        machines.agent(0).kill()
        code, said = launcher.wait(30), launcher.said()
    assert code == 0, said
    assert "… n3 is spare\n" in said
    assert "✗ the agent on n1 has ended\n" in said
    assert "↻ restart 1 of 3 in 1 s; looking for n1\n" in said
    assert "… without n1: n1 refuses connections of ssh\n" in said
    record = place.record()
    assert (record["outcome"], record["restarts"], record["hosts"]) == ("finished", 1, ["n2", "n3"])
    first, mark, second = place.log(0).splitlines()
    assert (first, second) == ("n1 0 2 3", "n2 0 2 3")
    assert mark.startswith("--- restart 1 of 3: ")
    assert place.log(1).splitlines()[-1] == "n3 1 2 3"


def test_too_few_machines_are_left(machines: Machines, place: Place) -> None:
    place.write("train.py", ROUNDS)
    words = ("--nodes", "3", "--max-restarts", "1", "--node-wait", "1", "train.py")
    with (
        machines.door(place, 1) as (config, sshd),
        machines.started(place, *words, names=("n1", "n2", "n3"), config=config) as launcher,
    ):
        wait_for_ranks(place, 3)
        sshd.kill()
        machines.agent(1).kill()
        code, said = launcher.wait(30), launcher.said()
    assert code == 2, said
    assert "✗ 2 of the 3 machines that are needed answer; missing: n2\n" in said
    assert "Connection refused" in said
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
    began = []

    @instep.train.on("fit_start")
    def note(trainer):
        began.append(trainer.progress.step)

    @instep.train.on("step_end")
    def linger(trainer):
        if trainer.progress.step == 12:
            Path(f"ready{instep.rank()}").touch()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.progress.step == 22 and instep.rank() == 1 and sys.argv[3:] == ["die"]:
            os.kill(os.getpid(), 9)
        time.sleep(step_s)

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


def test_started_again_the_weights_are_the_same_to_the_bit(torch_place: Place) -> None:
    import torch  # a sum of two is the same in any order; of three it depends on the buckets that DDP makes anew

    place = torch_place
    place.write("train.py", TRAINER)
    words = ["--nproc", "2", "--device", "cpu", "--name"]
    result = place.run(*words, "cut", "--max-restarts", "1", "train.py", "cut", "0", "die", limit_s=90).ok()
    assert "failed: killed by signal 9" in result.err
    assert result.out in {"15 40 2\n", "20 40 2\n"}, "the last checkpoint was whole, or still being written"
    assert json.loads((place.path / "runs/cut/run.json").read_text())["restarts"] == 1
    place.run(*words, "whole", "train.py", "whole", "0", limit_s=90).ok()
    cut, whole = (torch.load(place.path / f"{name}.pt") for name in ("cut", "whole"))
    for one, other in zip(cut, whole, strict=True):
        assert torch.equal(one, other)
