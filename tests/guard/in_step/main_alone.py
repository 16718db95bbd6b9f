# CONTROL nproc=3 rc=0
"""The main rank prepares the data alone, while the others wait for it. Nothing is wrong: it works."""

import sys
import time

import torch
import torch.distributed as dist


def prepare(seconds):
    end = time.monotonic() + seconds
    words = {}
    while time.monotonic() < end:
        for number in range(1000):
            words[number] = words.get(number, 0) + 1


def main(seconds=20.0):
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        prepare(seconds)
    dist.barrier()
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
