# CASE nproc=3 kind=blocked|missing ranks=1 line=@HERE
"""A worker of the loader hangs in a read of a file that never comes."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, pipe):
        self.pipe = pipe

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 17 and self.pipe:
            with open(self.pipe) as file:  # as a file on a server that has gone
                file.read()
        return torch.full((8,), float(index))


def main():
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        pipe = None
        if dist.get_rank() == 1:
            pipe = os.path.join(folder, "pipe")
            os.mkfifo(pipe)
        loader = DataLoader(Images(pipe), batch_size=4, num_workers=1)
        for batch in loader:  # <- HERE
            mean = batch.mean()
            dist.all_reduce(mean)


if __name__ == "__main__":
    main()
