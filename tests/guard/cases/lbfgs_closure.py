# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""An optimizer that calls back as often as it sees fit, by each rank's own loss."""

import torch
import torch.distributed as dist


def fit(rank):
    weight = torch.ones(5, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=4)
    goal = torch.arange(5.0)

    def closure():
        optimizer.zero_grad()
        loss = ((weight - goal) ** 4).sum()
        loss.backward()
        dist.all_reduce(weight.grad)
        return loss.clamp(max=0.0 if rank == 1 and epoch == 2 else 1e9)  # a loss that no longer moves on this shard

    for epoch in range(6):
        optimizer.step(closure)  # <- HERE
        dist.broadcast(weight.detach(), 0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    fit(dist.get_rank())
