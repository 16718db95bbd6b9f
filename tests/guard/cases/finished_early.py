# CASE nproc=3 kind=dead|missing ranks=2 line=@HERE
"""One rank has fewer steps to do and leaves, while the others still train."""

import time

import torch
import torch.distributed as dist


class Worker:
    def __init__(self, samples):
        self.samples = samples
        self.done = 0

    def work(self):
        while self.done < self.samples:  # <- HERE
            self.done += 8
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.05)


dist.init_process_group("gloo")
Worker(64 if dist.get_rank() == 2 else 96).work()
print("rank", dist.get_rank(), "has finished")
