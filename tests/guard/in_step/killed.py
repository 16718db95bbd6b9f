# CONTROL nproc=3 rc=137
"""A rank is killed from outside, as when memory runs out: its exit code is the job's."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(10):
    if step == 4 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))
