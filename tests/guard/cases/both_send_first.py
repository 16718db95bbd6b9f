# CASE nproc=2 kind=cycle|blocked ranks=0,1 line=@HERE
"""Two ranks exchange a large tensor, and both send first."""

import torch
import torch.distributed as dist


def exchange(x, peer):
    y = torch.empty_like(x)
    dist.send(x, peer)  # <- HERE
    dist.recv(y, peer)
    return y


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    exchange(torch.ones(8 << 20), 1 - dist.get_rank())
    dist.barrier()


if __name__ == "__main__":
    main()
