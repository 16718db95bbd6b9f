# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""A queue that is worked off until it is empty, and is empty earlier on one rank."""

from collections import deque

import torch
import torch.distributed as dist


def take(queue):
    return queue.popleft() if queue else None


def work_off(queue):
    done = 0
    while (item := take(queue)) is not None:  # <- HERE
        dist.all_reduce(torch.full((7,), float(item)))
        done += 1
    return done


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = 0
    for turn in range(4):
        total += work_off(deque(range(2 if rank == 2 and turn == 2 else 3)))
        objects = [None] * 3
        dist.all_gather_object(objects, total)


if __name__ == "__main__":
    main()
