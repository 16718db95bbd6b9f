# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""An error on one rank: on its way out it passes a `finally`, which waits for all the others."""

import torch
import torch.distributed as dist


def check(loss):
    if loss > 10:  # <- HERE
        raise ArithmeticError("the loss explodes")  # <- HERE


def epoch(rank):
    try:  # <- HERE
        for step in range(10):
            loss = torch.tensor(99.0 if rank == 2 and step == 4 else 1.0)
            check(loss)
            dist.all_reduce(loss)
    finally:
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    epoch(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
