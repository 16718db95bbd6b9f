# CASE nproc=3 kind=mismatch ranks=2 line=@HERE
"""The root of a reduction is computed by each rank for itself."""

import torch
import torch.distributed as dist


def owner(name, rank):
    return len(name) % 2 if rank != 2 else 2


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(4):
        dist.all_reduce(torch.ones(64))
    for name in ("weight", "bias", "scale"):
        value, root = torch.full((1000,), float(rank)), owner(name, rank)
        parts = [torch.empty(1000) for _ in range(size)] if rank == root else None
        dist.gather(value, parts, dst=root)  # <- HERE
        dist.barrier()


if __name__ == "__main__":
    main()
