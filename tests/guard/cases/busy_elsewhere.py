# CASE nproc=3 kind=missing|mismatch ranks=2 line=@HERE
"""A rank leaves for another phase, works there for a while, and then meets the others in the wrong place."""

import time

import torch
import torch.distributed as dist


def crunch(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def sample(rank):
    crunch(1.0)
    counts = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.ones(3))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reward = torch.zeros(1)
    for step in range(10):
        for update in range(2):
            if rank == 2 and step == 2 and update == 1:
                reward += 1
            if reward.item() >= 1:  # <- HERE
                break
            dist.all_reduce(torch.ones(10))
        sample(rank)


if __name__ == "__main__":
    main()
