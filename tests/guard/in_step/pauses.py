# CONTROL nproc=3 rc=0
"""Collections of garbage that take a while, at another time on each rank."""

import gc

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    junk = [[[] for _ in range(10)] for _ in range(200_000 if rank == 0 else 10)]
    for step in range(12):
        if step % 3 == rank:
            for _ in range(4):
                gc.collect()
        dist.all_reduce(torch.ones(100))
    assert junk
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
