# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""A hook that reduces a statistic is registered on the main rank only; torch calls it inside of the model."""

import torch
import torch.distributed as dist
from torch import nn


def log_norm(module, inputs, output):
    norm = output.norm().detach()
    dist.all_reduce(norm)


def build(rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    if rank == 0:  # <- HERE
        net[1].register_forward_hook(log_norm)
    return net


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.all_reduce(torch.ones(6))
    net = build(dist.get_rank())
    for _ in range(4):
        out = net(torch.ones(2, 4))  # <- HERE
        dist.broadcast(out.detach(), 0)


if __name__ == "__main__":
    main()
