# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""Two loaders side by side: the shorter one ends the loop."""

import itertools

import torch
import torch.distributed as dist


def pairs(labelled, unlabelled):
    yield from zip(itertools.islice(labelled, 100), unlabelled)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    labelled = (torch.ones(5) for _ in range(7))
    unlabelled = (torch.ones(5) for _ in range(5 if rank == 1 else 6))
    for step, (x, u) in enumerate(pairs(labelled, unlabelled)):  # <- HERE
        loss = (x + u).sum() * step
        dist.all_reduce(loss)
    dist.broadcast(torch.zeros(9), 0)


if __name__ == "__main__":
    main()
