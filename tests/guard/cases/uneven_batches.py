# CASE nproc=3 kind=mismatch|missing ranks=0 line=@HERE
"""An iterable dataset that has fewer batches on one rank: its loop ends while the others still train."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Shard(IterableDataset):
    def __init__(self, rank):
        self.count = 40 if rank == 0 else 48

    def __iter__(self):
        for number in range(self.count):
            yield torch.full((10,), float(number)), torch.tensor([number % 2], dtype=torch.float32)


def train_epoch(model, loader, optimizer):
    total, count = 0.0, 0
    for x, y in loader:  # <- HERE
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        count += 1
    mean = torch.tensor([total, count])
    dist.all_reduce(mean)
    return mean[0] / mean[1]


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Shard(dist.get_rank()), batch_size=8)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(3):
        print(epoch, train_epoch(model, loader, optimizer))


if __name__ == "__main__":
    main()
