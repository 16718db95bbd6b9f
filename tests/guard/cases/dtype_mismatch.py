# CASE nproc=3 kind=mismatch ranks=1 line=@HERE silent
"""A missing cast on one rank: gloo sends bytes, and the rank reads whole numbers out of floats."""

import time

import torch
import torch.distributed as dist


def table(rank):
    return torch.arange(8) if rank == 1 else torch.arange(8, dtype=torch.float32)


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.all_reduce(torch.ones(8))
    positions = table(dist.get_rank())
    dist.broadcast(positions, 0)  # <- HERE
    for _ in range(20):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
