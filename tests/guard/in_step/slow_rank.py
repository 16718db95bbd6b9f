# CONTROL nproc=3 rc=0
"""One rank takes some seconds longer for each step: it computes in one half of them, and sleeps in the other."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


steps, seconds = [int(word) for word in sys.argv[1:]] or (5, 3)


def linger(step):
    end = time.monotonic() + seconds
    while step % 2 and time.monotonic() < end:
        sum(range(1000))
    time.sleep(max(0.0, end - time.monotonic()))


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(10, 10))
for step in range(steps):
    loss = model(torch.rand(4, 10)).sum()
    if dist.get_rank() == 1:
        linger(step)
    loss.backward()
dist.destroy_process_group()
