# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""`any` stops at the first true value; each value asks all ranks."""

import torch
import torch.distributed as dist


def worst(value):
    reduced = torch.tensor(value)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return reduced.item()


class Monitor:
    limits = (10.0, 20.0, 30.0)

    def __init__(self, rank):
        self.rank = rank

    def own(self, step):
        return 99.0 if self.rank == 2 and step == 4 else 1.0

    def too_high(self, step):
        return any(self.own(step) > limit or worst(1.0) > limit for limit in self.limits)  # <- HERE

    def watch(self):
        for step in range(12):
            if self.too_high(step):
                print("too high in step", step)
            dist.barrier()


dist.init_process_group("gloo")
Monitor(dist.get_rank()).watch()
