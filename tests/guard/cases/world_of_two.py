# CASE nproc=2 kind=mismatch|missing|extra ranks=0|0,1 line=@HERE
"""A main rank that asks for more than the other one gives: there is no majority among two."""

import torch
import torch.distributed as dist


def summary(metrics):
    values = [None, None]
    dist.all_gather_object(values, metrics)
    return values


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10):
        grad = torch.ones(31)
        dist.all_reduce(grad)
        if rank == 0 and step == 4:  # <- HERE
            print(summary({"grad": grad.sum().item()}))


if __name__ == "__main__":
    main()
