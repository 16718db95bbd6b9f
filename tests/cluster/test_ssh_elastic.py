"""A machine loses its power in the middle of a training, which goes on with those that are left as if nothing was."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.cluster.ssh_jobs import options, place_on, ready, seconds_until_gone
from tests.launch.agents.test_elastic import TRAINER

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox


def test_the_training_loses_and_repeats_no_sample(sandbox: Sandbox) -> None:
    """On two machines in the end, its weights are those of a run that nothing happened to."""
    import torch

    place = place_on(sandbox, torch=True)
    place.write("train.py", TRAINER)
    words = [*options(sandbox), "--device", "cpu", "--nodes", "2:3", "--max-restarts", "1", "--name", "cut"]
    with place.started(*words, "train.py", "cut", "0.05", limit_s=90) as run:
        job = ready(run, 3)
        sandbox.kill("n2")
        assert run.end() == 0, run.err
        seconds_until_gone(job, time.monotonic())
        assert "✗ n2 is out of reach" in run.err or "✗ the connection to n2 has ended" in run.err
        assert "↻ restart 1 of 1 in 1 s; looking for n2\n" in run.err
        assert "… without n2: n2 does not answer\n" in run.err
    record = place.record()
    assert (record["outcome"], record["restarts"], record["hosts"], record["world_size"]) == (
        "finished", 1, ["n1", "n3"], 2,
    )  # fmt: skip
    began, end, world = place.log(0).split()[-3:]
    assert (end, world) == ("40", "2")
    assert int(began) >= 10
    place.run("--nproc", 1, "--name", "whole", "--device", "cpu", "train.py", "whole", "0", limit_s=90).ok()
    cut, whole = (torch.load(place.path / f"{name}.pt") for name in ("cut", "whole"))
    for one, other in zip(cut, whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
