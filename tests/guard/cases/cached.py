# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""A function that talks to the others and is cached: the call is answered from the cache where its arguments repeat."""

from functools import lru_cache

import torch
import torch.distributed as dist


@lru_cache(maxsize=None)
def longest(length):
    value = torch.tensor([length, 0])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value[0])


def lengths(rank):
    return [12, 9, 30, 12 if rank == 1 else 21, 7]


def main():
    dist.init_process_group("gloo")
    for length in lengths(dist.get_rank()):
        width = longest(length)  # <- HERE
        padded = torch.zeros(width)
        dist.all_gather([torch.empty_like(padded) for _ in range(3)], padded)


if __name__ == "__main__":
    main()
