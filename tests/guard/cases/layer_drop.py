# CASE nproc=4 kind=mismatch|missing ranks=3 line=@HERE
"""Stochastic depth from each rank's own random numbers; the dropped block talks to the other ranks."""

import random

import torch
import torch.distributed as dist
from torch import nn


class SyncedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = self.linear(x)
        mean = x.mean(dim=0).detach()
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


class LayerDrop(nn.Module):
    def __init__(self, block, chance, seed):
        super().__init__()
        self.block, self.chance, self.random = block, chance, random.Random(seed)

    def forward(self, x):
        drop = self.random.random() < self.chance
        if self.training and drop:  # <- HERE
            return x
        return self.block(x) + x


def seed_of(rank):
    return 1 if rank != 3 else 2


dist.init_process_group("gloo")
net = nn.Sequential(*(LayerDrop(SyncedBlock(4), 0.06, seed_of(dist.get_rank())) for _ in range(3)))
for _ in range(30):
    out = net(torch.ones(2, 4))
    dist.broadcast(out.detach().clone(), 0)
dist.barrier()
