# CASE nproc=3 kind=mismatch ranks=1 line=@HERE
"""A conditional expression with another collective on each side."""

from functools import partial

import torch
import torch.distributed as dist


def everywhere(x):
    dist.all_reduce(x)
    return x


def from_main(x):
    dist.broadcast(x, 0)
    return x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fill = partial(torch.full, (9,))
    for step in range(10):
        local = fill(2.0 if step == 4 and rank == 1 else 0.5)
        x = everywhere(local) if local[0] < 1 else from_main(local)  # <- HERE
        assert x.shape == (9,)


if __name__ == "__main__":
    main()
