# CASE nproc=3 kind=missing|blocked|mismatch|extra ranks=2 line=@HERE
"""A rank waits for a message that nobody sends, while the others have gone on."""

import torch
import torch.distributed as dist


def pass_on(rank, size, x, micro):
    if rank > 0:
        dist.recv(x, rank - 1, tag=micro)
    if rank < size - 1:
        dist.send(x, rank + 1, tag=micro)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        micros = 3 if rank != 2 or step < 4 else 4
        for micro in range(micros):  # <- HERE
            pass_on(rank, size, torch.ones(10), micro)
        dist.all_reduce(torch.ones(10))


if __name__ == "__main__":
    main()
