# CASE nproc=3 kind=missing|blocked ranks=1 line=@HERE
"""A rank that takes another branch and is idle there, having passed by what the others wait for."""

import time

import torch
import torch.distributed as dist


def serve():
    print("this rank serves")
    time.sleep(900)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(4):
        dist.all_reduce(torch.ones(10))
    role = "server" if rank == 1 else "trainer"
    if role == "server":  # <- HERE
        serve()
    else:
        for _ in range(10):
            dist.all_reduce(torch.ones(10))


if __name__ == "__main__":
    main()
