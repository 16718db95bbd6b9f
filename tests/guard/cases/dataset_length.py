# CASE nproc=3 kind=mismatch ranks=0 line=- silent
"""A file too many on one machine: the data set is longer there, the number of batches is the same."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Files(Dataset):
    def __init__(self, count):
        self.names = [f"{number:04}.png" for number in range(count)]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return float(self.names[index][:4])


dist.init_process_group("gloo")
data = Files(90 if dist.get_rank() else 89)
loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data))
for value in loader:
    dist.all_reduce(value)
    time.sleep(0.1)
dist.destroy_process_group()
