# CASE nproc=3 kind=dead|missing ranks=1 line=@HERE
"""A rank leaves before its group has connected for the first time: gloo connects late when it is told to."""

import os
import sys

os.environ["TORCH_GLOO_LAZY_INIT"] = "1"

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    for _ in range(4):
        dist.all_reduce(torch.ones(3))
    if rank == 1:  # <- HERE
        sys.exit(0)
    if rank == 2:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


if __name__ == "__main__":
    main()
