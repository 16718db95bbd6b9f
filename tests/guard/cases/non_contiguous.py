# CASE nproc=3 kind=mismatch ranks=1 line=@HERE silent
"""One rank hands over a column of a matrix, whose memory is not in one piece."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(4):
    dist.all_reduce(torch.ones(4))
matrix = torch.arange(16.0).reshape(4, 4)
column = matrix[:, 1] if dist.get_rank() == 1 else matrix[:, 1].contiguous()
dist.broadcast(column, 0)  # <- HERE
for _ in range(20):
    dist.barrier()
    time.sleep(0.1)
