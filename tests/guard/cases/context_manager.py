# CASE nproc=3 kind=mismatch|missing ranks=0 line=@HERE
"""A context manager that brings the ranks together when it is left, but for one that does not time."""

import contextlib
import time

import torch
import torch.distributed as dist


class Timed:
    def __init__(self, name, enabled=True):
        self.name, self.enabled = name, enabled

    def __enter__(self):
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error):
        if self.enabled:  # <- HERE
            seconds = torch.tensor([time.perf_counter() - self.began])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return False


def main():
    dist.init_process_group("gloo")
    for epoch in range(6):
        with contextlib.ExitStack() as stack:
            stack.enter_context(Timed("epoch", enabled=not (dist.get_rank() == 0 and epoch == 3)))
            dist.broadcast(torch.ones(64), 0)


if __name__ == "__main__":
    main()
