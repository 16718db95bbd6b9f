# CONTROL nproc=3 rc=0
"""The main rank sleeps before what the others wait in: a sleep ends by itself."""

import sys
import time

import torch
import torch.distributed as dist


def main(seconds=20.0):
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        time.sleep(seconds)
    dist.barrier()
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
