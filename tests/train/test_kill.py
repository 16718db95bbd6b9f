"""Killed at random moments, again and again, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import instep
from tests.harness import RankDiedError, run_ranks
from tests.train import cases

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 15
STEPS = 1500


def kill_after_s(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Any, kill_after: dict[int, float]) -> Any:
    @instep.train.on("fit_start")
    def set_the_bomb(trainer: instep.Trainer) -> None:
        delay = kill_after.get(instep.rank())
        if delay is not None:
            threading.Thread(target=kill_after_s, args=(delay,), daemon=True).start()

    checkpoints = instep.train.Checkpoints(folder=folder, every_steps=10, every_epochs=None)
    trainer = instep.Trainer(
        cases.net, cases.adamw, cases.data(61), callbacks=[set_the_bomb], checkpoint=checkpoints, resume="auto",
        schedule="cosine", **cases.quiet(global_batch=8, steps=STEPS, accumulate=2),
    )  # fmt: skip
    began = trainer.progress.step
    end = trainer.fit()
    return cases.weights(trainer), end.step, began


def test_killed_again_and_again_at_random_moments(tmp_path: Path) -> None:
    """Final weights are bit-equal to those of a training that nobody disturbed."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    kills = 0
    while kills < KILLS:
        victims = dice.choice([(0,), (1,), (0, 1)])
        moments = {rank: dice.uniform(0, 0.06) for rank in victims}
        try:
            run_ranks(train, 2, tmp_path / "cut", moments, limit_s=60)
        except (RankDiedError, RuntimeError, instep.InstepError):  # the one that was killed, or who missed it
            kills += 1
        else:
            raise AssertionError(f"finished after {kills} kills: the training is too short for this machine")
    cut = run_ranks(train, 2, tmp_path / "cut", {}, limit_s=120)
    whole = run_ranks(train, 2, tmp_path / "whole", {}, limit_s=120)
    for rank in range(2):
        assert cut[rank][1] == whole[rank][1] == STEPS
        assert cases.equal(cut[rank][0], whole[rank][0])
