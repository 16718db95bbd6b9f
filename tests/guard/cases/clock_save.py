# CASE nproc=3 kind=extra|mismatch ranks=1 line=@HERE
"""A save that is due by the clock, and one machine's clock is ahead."""

import time

import torch
import torch.distributed as dist

SKEW = {0: 0.0, 1: 100.0, 2: 0.0}


class Periodic:
    def __init__(self, seconds, rank):
        self.seconds, self.rank, self.last = seconds, rank, time.time()

    def due(self, step):
        now = time.time() + (SKEW[self.rank] if step > 4 else 0.0)
        if now - self.last >= self.seconds:
            self.last = now
            return True
        return False


def save(state):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)


def main():
    dist.init_process_group("gloo")
    periodic = Periodic(60, dist.get_rank())
    for step in range(100):
        dist.all_reduce(torch.ones(40))
        if periodic.due(step):  # <- HERE
            save({"step": step})
        dist.broadcast(torch.ones(1), 0)


if __name__ == "__main__":
    main()
