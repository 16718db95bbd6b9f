# CASE nproc=4 kind=mismatch|missing ranks=2 line=@HERE
"""The `else` of a `try` has the step; one rank runs out of memory, or so it says."""

import torch
import torch.distributed as dist


def forward(x, step):
    if dist.get_rank() == 2 and step == 4:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return x * 2


def train():
    skipped = 0
    for step in range(10):
        x = torch.ones(12)
        try:
            y = forward(x, step)
        except RuntimeError as error:  # <- HERE
            if "out of memory" not in str(error):
                raise
            skipped += 1
        else:
            dist.all_reduce(y)
        dist.all_gather([torch.empty(1) for _ in range(4)], torch.ones(1))
    return skipped


dist.init_process_group("gloo")
train()
