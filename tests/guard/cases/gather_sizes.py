# CASE nproc=4 kind=mismatch ranks=2 line=@HERE
"""Predictions are gathered without padding: the last batch is smaller on one rank."""

import torch
import torch.distributed as dist


class Evaluator:
    def __init__(self):
        self.world = dist.get_world_size()

    def gather(self, predictions):
        parts = [torch.empty_like(predictions) for _ in range(self.world)]
        dist.all_gather(parts, predictions)  # <- HERE
        return torch.cat(parts)

    def run(self, batches):
        return [self.gather(torch.rand(size, 10)) for size in batches]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Evaluator().run([64, 64, 64, 33 if dist.get_rank() == 2 else 64])
    dist.destroy_process_group()
