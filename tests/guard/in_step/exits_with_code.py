# CONTROL nproc=3 rc=3
"""A rank ends itself with a code of its own."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(10):
    if step == 4 and dist.get_rank() == 0:
        sys.exit(3)
    dist.all_reduce(torch.ones(10))
