# CASE nproc=3 kind=mismatch|missing|dead ranks=0 line=@HERE
"""A loop without end that a StopIteration leaves, earlier on one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Task:
    def __init__(self, rank):
        self.model = DistributedDataParallel(nn.Linear(4, 1))
        self.stream = iter([torch.ones(2, 4)] * (6 if rank == 0 else 9))

    def fetch(self):
        return next(self.stream)  # <- HERE

    def run(self):
        while True:
            try:
                batch = self.fetch()  # <- HERE
            except StopIteration:  # <- HERE
                break
            self.model(batch).sum().backward()


def main():
    dist.init_process_group("gloo")
    task = Task(dist.get_rank())
    task.run()
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
