# CASE nproc=3 kind=extra|mismatch ranks=0 line=@HERE
"""The main rank evaluates through the wrapped model, whose buffers are broadcast in each forward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build():
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))


def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        losses = [model(batch).square().mean() for batch in batches]
    model.train()
    return torch.stack(losses).mean()


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    model = build()
    for epoch in range(4):
        train(model, 2)
        if epoch == 1 and dist.get_rank() == 0:  # <- HERE
            print("validation loss", evaluate(model, torch.randn(3, 4, 6)))
        dist.barrier()


if __name__ == "__main__":
    main()
