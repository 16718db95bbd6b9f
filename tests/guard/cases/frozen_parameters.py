# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""Gradients are averaged by hand, and one rank has frozen a layer."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        if parameter.grad is not None:  # <- HERE
            dist.all_reduce(parameter.grad.data)
            parameter.grad.data /= size


def main():
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if step == 4 and dist.get_rank() == 2:
            model[1].weight.requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        average_gradients(model)
        optimizer.step()
        dist.barrier()


if __name__ == "__main__":
    main()
