# CONTROL nproc=3 rc=0
"""One rank takes three seconds longer for each step: it computes in one half of them, and sleeps in the other."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def linger(step):
    end = time.monotonic() + 3
    while step % 2 and time.monotonic() < end:
        sum(range(1000))
    time.sleep(max(0.0, end - time.monotonic()))


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(10, 10))
for step in range(5):
    loss = model(torch.rand(4, 10)).sum()
    if dist.get_rank() == 1:
        linger(step)
    loss.backward()
dist.destroy_process_group()
