# CASE nproc=3 kind=mismatch|missing ranks=2 line=@HERE
"""Batches by length from a shuffle without a seed: in a later epoch a rank has one batch less."""

import random

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler


class Texts(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class BucketSampler(Sampler):
    """Fills a batch up to so many words."""

    def __init__(self, words):
        self.words = words
        self.epoch = 0

    def lengths(self):
        lengths = [5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1]
        if self.epoch == 2 and dist.get_rank() == 2:
            lengths.sort()  # what the unseeded shuffle came to on this rank
        elif self.epoch:
            random.Random(self.epoch).shuffle(list(lengths))
        return lengths

    def __iter__(self):
        batch, words = [], 0
        for index, length in enumerate(self.lengths()):
            batch.append(index)
            words += length
            if words >= self.words:
                yield batch
                batch, words = [], 0
        self.epoch += 1


class Loop:
    def __init__(self):
        self.loader = DataLoader(Texts(), batch_sampler=BucketSampler(6))
        self.grad = torch.zeros(64)

    def run(self, epochs):
        for _ in range(epochs):
            self.epoch()
            self.finish()

    def epoch(self):
        for batch in self.loader:  # <- HERE
            self.grad.fill_(batch.mean())
            dist.all_reduce(self.grad)

    def finish(self):
        dist.barrier()


dist.init_process_group("gloo")
Loop().run(4)
dist.destroy_process_group()
