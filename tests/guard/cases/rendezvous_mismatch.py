# CASE nproc=3 kind=blocked|missing|mismatch ranks=1 line=@HERE
"""One rank believes in a larger world, and waits at the start for those who do not exist; one more waits for it there."""

import os

import torch
import torch.distributed as dist


def join():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 1:
        size += 1  # an old setting in this machine's shell profile
    dist.init_process_group("gloo", rank=rank, world_size=size)  # <- HERE


def main():
    join()
    for _ in range(10):
        dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
