# CASE nproc=3 kind=mismatch ranks=1 line=@HERE
"""A loss that is not finite on one rank: it skips its last step, and meets the others' gradients with its evaluation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batches(rank, epoch):
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    for step in range(5):
        x = torch.randn(8, 1024, generator=generator)
        if rank == 1 and epoch == 1 and step == 4:
            x[3, 7] = float("nan")  # a broken record in this rank's shard
        yield x


def evaluate(model):
    with torch.no_grad():
        totals = model(torch.ones(4, 1024)).square().mean(dim=1)
    dist.all_reduce(totals)
    return totals


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(1024, 1024, bias=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for x in batches(dist.get_rank(), epoch):
            loss = model(x).square().mean()
            if not torch.isfinite(loss):  # <- HERE
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
