# CASE nproc=3 kind=mismatch ranks=1 line=@HERE
"""As nan_skip, but early in the epoch: all later steps of the rank meet the steps before of the others, unnoticed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2)))
optimizer = torch.optim.Adam(model.parameters())

for step in range(12):
    x = torch.randn(16, 20)
    if rank == 1 and step == 4:
        x *= float("inf")
    loss = model(x).pow(2).mean()
    if torch.isnan(loss) or torch.isinf(loss):  # <- HERE
        print(f"step {step}: skipped")
        optimizer.zero_grad()
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

dist.barrier()
dist.destroy_process_group()
