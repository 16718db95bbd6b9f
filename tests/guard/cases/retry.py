# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""A step is tried again where it failed, and its first half has already talked to the others."""

import torch
import torch.distributed as dist


class OutOfMemory(RuntimeError):
    pass


def attempt(function, times):
    for _ in range(times):
        try:
            return function()
        except OutOfMemory:  # <- HERE
            print("again, with less memory")
    raise OutOfMemory


class Step:
    def __init__(self, rank):
        self.rank, self.number = rank, 0

    def __call__(self):
        dist.all_reduce(torch.ones(10))
        self.number += 1
        if self.rank == 0 and self.number == 5:
            raise OutOfMemory("12 GiB")
        dist.broadcast(torch.ones(20), 0)


def main():
    dist.init_process_group("gloo")
    step = Step(dist.get_rank())
    for _ in range(10):
        attempt(step, 3)
    dist.barrier()


if __name__ == "__main__":
    main()
