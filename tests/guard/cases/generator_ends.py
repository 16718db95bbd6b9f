# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""A generator of batches stops at a short one, which only one rank has."""

import torch
import torch.distributed as dist


def read(rank):
    for number in range(12):
        yield torch.ones(8 if rank != 2 or number < 6 else 3)


def full(batches, size):
    for batch in batches:
        if len(batch) < size:  # <- HERE
            return
        yield batch


def scaled(batches):
    for batch in batches:
        yield batch / 255


def main():
    dist.init_process_group("gloo")
    for batch in scaled(full(read(dist.get_rank()), 8)):  # <- HERE
        dist.all_reduce(batch)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
