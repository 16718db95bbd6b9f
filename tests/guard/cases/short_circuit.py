# CASE nproc=4 kind=mismatch|missing ranks=0 line=@HERE
"""The right side of an `and` asks all ranks, but is only reached where the left side holds."""

import torch
import torch.distributed as dist


def all_agree(flag):
    value = torch.tensor([int(flag)])
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return bool(value)


def should_save(step, rank):
    improved = not (rank == 0 and step == 4)
    return improved and all_agree(step % 2)  # <- HERE


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(30):
        grad = torch.ones(77)
        dist.all_reduce(grad)
        if should_save(step, rank):
            dist.barrier()


if __name__ == "__main__":
    main()
