# CASE nproc=4 kind=missing|mismatch ranks=3 line=@HERE
"""A barrier for some ranks only: the last one takes its next barrier for it, and is one behind from there on."""

import time

import torch
import torch.distributed as dist


def prepare(rank):
    if rank != 3:  # <- HERE
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(4):
        dist.all_reduce(torch.ones(8))
    prepare(rank)
    dist.barrier()
    print(rank, "is prepared")
    for _ in range(6000):
        time.sleep(0.1)  # serves, until it is told to end


if __name__ == "__main__":
    main()
