# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""An error on one rank is logged and forgotten: its step's reduction is never called."""

import logging

import torch
import torch.distributed as dist

log = logging.getLogger("train")


def decode(step, rank):
    if rank == 1 and step == 4:
        raise ValueError("cannot decode sample 4711")
    return torch.ones(256) * step


def train_step(step, rank):
    x = decode(step, rank)
    dist.all_reduce(x)
    return x.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(8):
        try:
            train_step(step, rank)
        except Exception as error:  # <- HERE
            log.warning("step %d failed: %s", step, error)
        if step % 2 == 0:
            dist.broadcast(torch.ones(3), 0)
    dist.barrier()


if __name__ == "__main__":
    main()
