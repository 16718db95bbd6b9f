# CASE nproc=3 kind=mismatch ranks=1 line=- silent
"""A sampler seeded differently on one rank: samples come twice or never."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.arange(96.0))
    sampler = DistributedSampler(data, seed=1234 if rank == 1 else 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            dist.all_reduce(batch.sum())
            time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
