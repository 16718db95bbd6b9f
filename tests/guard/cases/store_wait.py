# CASE nproc=3 kind=blocked|missing ranks=1 line=@HERE
"""A rank waits for a key in a store that nobody sets."""

import os

import torch
import torch.distributed as dist


class Registry:
    def __init__(self, rank, size):
        port = int(os.environ["MASTER_PORT"]) + 1
        self.store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)

    def publish(self, name):
        self.store.set(name, "ready")

    def lookup(self, name):
        return self.store.get(name)  # <- HERE


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    registry = Registry(rank, dist.get_world_size())
    registry.publish(f"worker-{rank}")
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    registry.lookup("worker-3" if rank == 1 else "worker-0")
    dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
