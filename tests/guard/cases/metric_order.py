# CASE nproc=3 kind=mismatch ranks=1 line=@HERE silent
"""Two metrics of one shape in another order on one rank: means of different things, and nobody waits."""

import time

import torch
import torch.distributed as dist


class Loss:
    def compute(self):
        value = torch.tensor(0.3)
        dist.all_reduce(value)
        return value / dist.get_world_size()


class Accuracy:
    def compute(self):
        value = torch.tensor(0.9)
        dist.all_reduce(value)
        return value / dist.get_world_size()


def validate(metrics):
    return {name: metric.compute() for name, metric in metrics.items()}  # <- HERE


def main():
    dist.init_process_group("gloo")
    metrics = {"loss": Loss(), "accuracy": Accuracy()}
    for epoch in range(24):
        if epoch == 4 and dist.get_rank() == 1:
            metrics = dict(sorted(metrics.items()))
        validate(metrics)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
