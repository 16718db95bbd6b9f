# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""A list of reduced values, without the empty ones."""

import torch
import torch.distributed as dist


def total(x):
    value = x.sum()
    dist.all_reduce(value)
    return value


def chunks(rank, step):
    sizes = [3, 3, 0] if rank == 1 and step == 4 else [3, 2, 1]
    return [torch.ones(size) for size in sizes]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10):
        totals = [total(chunk) for chunk in chunks(rank, step) if chunk.numel()]  # <- HERE
        dist.broadcast(torch.stack([totals[0], totals[1]]), 0)


if __name__ == "__main__":
    main()
