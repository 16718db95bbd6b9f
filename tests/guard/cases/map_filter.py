# CASE nproc=4 kind=mismatch|missing ranks=1 line=@HERE
"""Functions handed to functions: what is left out by the filter is not reduced."""

import torch
import torch.distributed as dist


def reduce_all(tensors, keep):
    return list(map(lambda one: dist.all_reduce(one) or one, filter(keep, tensors)))  # <- HERE


def gradients(rank, step):
    last = None if rank == 1 and step == 4 else torch.ones(3)
    return [torch.ones(3), torch.ones(3), last]


def main():
    dist.init_process_group("gloo")
    for step in range(8):
        reduce_all(gradients(dist.get_rank(), step), lambda one: one is not None)
        dist.broadcast(torch.ones(1), 0)


main()
