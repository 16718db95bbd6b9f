# CASE nproc=3 kind=dead|missing ranks=2 line=@HERE
"""A helper ends the process of a rank that has nothing to do, as it once was right for one process."""

import os
import sys

import torch
import torch.distributed as dist


def check(budget):
    if budget <= 0:  # <- HERE
        sys.stdout.flush()
        os._exit(0)


def main():
    dist.init_process_group("gloo")
    budget = 5 if dist.get_rank() == 2 else 50
    for _ in range(50):
        check(budget)
        dist.all_reduce(torch.ones(3))
        budget -= 1


if __name__ == "__main__":
    main()
