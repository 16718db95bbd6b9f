# CASE nproc=4 kind=missing ranks=2 line=@HERE
"""Two groups that each save: a rank picks the group of the others, where its call is nothing but a warning."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=groups[rank // 2])
    group = groups[rank // 3]  # <- HERE
    dist.all_reduce(torch.zeros(16), group=group)  # <- HERE
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
