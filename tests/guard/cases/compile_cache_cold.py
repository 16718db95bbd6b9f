# CASE nproc=3 kind=extra|mismatch ranks=1 line=@HERE
"""A step that is compiled anew on one rank, whose cache is cold: compiling talks to the other ranks."""

import torch
import torch.distributed as dist

CACHE = {}


def compiled(shape):
    try:
        return CACHE[shape]
    except KeyError:  # <- HERE
        timing = torch.ones(2)
        dist.all_reduce(timing)
        CACHE[shape] = lambda x: x * 2
        return CACHE[shape]


def step(x):
    kernel = compiled(tuple(x.shape))
    y = kernel(x)
    dist.all_reduce(y)


def main():
    dist.init_process_group("gloo")
    for number in range(10):
        if number == 4 and dist.get_rank() == 1:
            CACHE.clear()
        step(torch.ones(6, 6))


if __name__ == "__main__":
    main()
