# CASE nproc=3 kind=mismatch|missing|extra ranks=2 line=@HERE
"""Each rank counts its own micro-batches; one skipped an empty one, and its window ends later than the others'."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Accumulator:
    def __init__(self, model, window):
        self.model, self.window, self.seen = model, window, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def micro_step(self, x):
        if len(x) == 0:  # <- HERE
            return
        self.seen += 1
        boundary = self.seen % self.window == 0
        with nullcontext() if boundary else self.model.no_sync():  # <- HERE
            self.model(x).square().mean().backward()
        if boundary:  # <- HERE
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.report()

    def report(self):
        count = torch.tensor([self.seen])
        dist.all_reduce(count)


dist.init_process_group("gloo")
accumulator = Accumulator(DistributedDataParallel(nn.Linear(6, 6)), window=4)
for step in range(16):
    empty = dist.get_rank() == 2 and step == 9
    accumulator.micro_step(torch.randn(0 if empty else 5, 6))
dist.barrier()
