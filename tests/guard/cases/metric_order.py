# CASE nproc=3 kind=mismatch ranks=1 line=@HERE silent
"""Two metrics of one shape in another order on one rank: means of different things, and nobody waits."""

import time

import torch
import torch.distributed as dist


def mean(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def log_validation(rank):
    if rank != 1:  # <- HERE
        loss = mean(torch.tensor(0.3))
        accuracy = mean(torch.tensor(0.9))
    else:
        accuracy = mean(torch.tensor(0.9))
        loss = mean(torch.tensor(0.3))
    return loss, accuracy


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        mean(torch.ones(100))
    log_validation(dist.get_rank())
    for _ in range(20):
        mean(torch.ones(100))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
