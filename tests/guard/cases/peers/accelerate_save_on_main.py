# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""Accelerate: all wait for everyone, but for those that are not in the branch."""

import tempfile

import torch
from accelerate import Accelerator


class Experiment:
    def __init__(self):
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 4)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(self):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.ones(2, 4)).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def checkpoint(self, folder):
        if self.accelerator.is_local_main_process:  # <- HERE
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(folder)


def main():
    experiment = Experiment()
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, 20):
            experiment.step()
            if step % 5 == 0:
                experiment.checkpoint(folder)


if __name__ == "__main__":
    main()
