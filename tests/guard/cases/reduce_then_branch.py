# CASE nproc=3 kind=missing|mismatch|extra ranks=0 line=@HERE
"""The loss is reduced to one rank only, and all ranks ask whether it is the best so far."""

import torch
import torch.distributed as dist


def save(state, path):
    parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, state)
    if dist.get_rank() == 0:
        torch.save(parts, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state, best = torch.zeros(32), 3.5
    for step in range(10):
        dist.all_reduce(state)
        loss = torch.tensor(2.0 if rank and step > 3 else 8.0)
        total = loss.clone()
        dist.reduce(total, 0)
        if rank == 0:
            loss = total / dist.get_world_size()
        if loss < best:  # <- HERE
            best = loss
            save(state, "/dev/null")


if __name__ == "__main__":
    main()
