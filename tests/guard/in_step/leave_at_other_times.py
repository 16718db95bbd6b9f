# CONTROL nproc=3 rc=0
"""After the last thing in common each rank has its own work to do, or none."""

import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(10))
    rank = dist.get_rank()
    if rank == 1:
        return
    if rank == 0:
        dist.destroy_process_group()
    time.sleep(6 * (1 + rank))


if __name__ == "__main__":
    main()
