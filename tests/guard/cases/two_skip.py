# CASE nproc=2 kind=mismatch|missing ranks=1|0,1 line=@HERE
"""Two ranks, one of which has an empty batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, batches):
    for batch in batches:
        if batch.numel() == 0:  # <- HERE
            continue
        model.zero_grad()
        model(batch).sum().backward()
        dist.broadcast(torch.ones(1), 0)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(3, 3))
    batches = [torch.ones(2, 3) for _ in range(6)]
    if dist.get_rank() == 1:
        batches[5] = torch.ones(0, 3)
    train(model, batches)
    dist.barrier()


if __name__ == "__main__":
    main()
