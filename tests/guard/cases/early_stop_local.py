# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""Each rank decides by its own validation loss whether to stop."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.bad = 0

    def update(self, loss):
        if loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def validate(rank, epoch):
    return 1.0 / (epoch + 1) if rank != 1 or epoch < 2 else 1.0


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = EarlyStopping(patience=2)
    for epoch in range(50):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        loss = validate(rank, epoch)
        if stopping.update(loss):  # <- HERE
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
