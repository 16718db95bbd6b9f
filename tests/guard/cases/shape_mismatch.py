# CASE nproc=3 kind=mismatch ranks=1 line=@HERE
"""A tensor's size comes from local data: gloo ends the process without a word of Python."""

import torch
import torch.distributed as dist


def rows(rank, step):
    return 200 if rank == 1 and step == 4 else 100


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10):
        table = torch.zeros(rows(rank, step), 32)
        table += rank
        dist.all_reduce(table)  # <- HERE
    dist.barrier()


main()
