# CASE nproc=3 kind=mismatch ranks=2 line=@HERE
"""Metrics come in the order in which each rank met them; their sizes differ."""

import torch
import torch.distributed as dist


class Metrics(dict):
    def add(self, name, value):
        self[name] = self.get(name, 0) + value

    def reduce(self):
        for name, value in self.items():
            dist.all_reduce(value)  # <- HERE
            self[name] = value / dist.get_world_size()


def epoch(rank, number):
    metrics = Metrics()
    names = ["loss", "confusion"] if rank != 2 or number < 2 else ["confusion", "loss"]
    for name in names:
        metrics.add(name, torch.ones(1) if name == "loss" else torch.ones(10, 10))
    metrics.reduce()
    return metrics


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number in range(5):
        epoch(dist.get_rank(), number)
    dist.barrier()
