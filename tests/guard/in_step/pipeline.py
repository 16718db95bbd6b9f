# CONTROL nproc=3 rc=0
"""Stages that hand tensors on, the middle one slowly: the others wait for it most of the time."""

import time

import torch
import torch.distributed as dist


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.rand(100, 100) @ torch.rand(100, 100)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        x = torch.ones(1000)
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank == 1:
            work(4.0)
        if rank < size - 1:
            dist.send(x, rank + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
