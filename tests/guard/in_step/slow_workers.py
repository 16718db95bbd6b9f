# CONTROL nproc=2 rc=0
"""The workers of one rank's loader are slow, as from a file server under load."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return float(index)


def main():
    dist.init_process_group("gloo")
    for value in DataLoader(Slow(4.0 * dist.get_rank()), num_workers=1):
        dist.all_reduce(value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
