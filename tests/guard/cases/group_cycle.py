# CASE nproc=3 kind=cycle ranks=0,1,2 line=@HERE
"""Three ranks in a ring of groups of two: each waits first in the group with its right neighbour."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([left, (left + 1) % size]) for left in range(size)]
    for _ in range(4):
        dist.all_reduce(torch.ones(16))
    for offset in (0, -1):
        pair = pairs[(rank + offset) % size]
        dist.all_reduce(torch.ones(4), group=pair)  # <- HERE
    dist.barrier()


if __name__ == "__main__":
    main()
