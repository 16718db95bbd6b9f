# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""Each rank trains as long as its own clock allows."""

import time

import torch
import torch.distributed as dist


def budget(rank):
    return 0.5 if rank == 2 else 30.0


def main():
    dist.init_process_group("gloo")
    deadline = time.monotonic() + budget(dist.get_rank())
    steps = 0
    while time.monotonic() < deadline:  # <- HERE
        dist.all_reduce(torch.ones(128))
        time.sleep(0.02)
        steps += 1
    dist.all_gather([torch.empty(1) for _ in range(3)], torch.tensor([float(steps)]))


if __name__ == "__main__":
    main()
