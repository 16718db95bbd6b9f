# CASE nproc=3 kind=cycle|blocked ranks=0,1,2 line=@HERE
"""A pipeline's ring, where everyone first waits for what its neighbour has not sent."""

import torch
import torch.distributed as dist


class Stage:
    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def shift(self, x):
        y = torch.empty_like(x)
        request = dist.irecv(y, (self.rank - 1) % self.size)
        request.wait()  # <- HERE
        dist.isend(x, (self.rank + 1) % self.size).wait()
        return y


dist.init_process_group("gloo")
dist.barrier()
stage = Stage()
for _ in range(3):
    dist.all_reduce(torch.ones(2))
stage.shift(torch.ones(5))
dist.barrier()
