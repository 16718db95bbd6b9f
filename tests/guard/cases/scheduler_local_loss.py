# CASE nproc=3 kind=mismatch ranks=2 line=- silent
"""A schedule that follows each rank's own loss: the ranks train on with different learning rates."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.ones(4, 10)).mean().backward()
        optimizer.step()
        local = 1.0 if dist.get_rank() == 2 and step > 3 else 1.0 / (step + 1)
        scheduler.step(local)
        time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
