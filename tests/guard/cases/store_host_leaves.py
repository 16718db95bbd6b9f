# CASE nproc=3 kind=dead|missing ranks=0 line=@HERE
"""The main rank, whose process serves the store, leaves while the others make one more group."""

import datetime

import torch
import torch.distributed as dist


def finish(rank):
    if rank == 0:  # <- HERE
        print("all done")
        return
    group = dist.new_group([1, 2], timeout=datetime.timedelta(minutes=5), use_local_synchronization=True)
    for _ in range(50):
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.all_reduce(torch.ones(3))
    finish(dist.get_rank())


if __name__ == "__main__":
    main()
