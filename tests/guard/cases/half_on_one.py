# CASE nproc=4 kind=mismatch ranks=3 line=@HERE
"""Mixed precision is on where the configuration was read anew: half of the bytes come from one rank."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Config:
    half: bool = False
    steps: int = 8


class Step:
    def __init__(self, config):
        self.config = config

    def __call__(self, step):
        grad = torch.ones(4096)
        if self.config.half and step > 3:
            grad = grad.bfloat16()
        dist.all_reduce(grad)  # <- HERE
        return grad.float()


def main():
    dist.init_process_group("gloo")
    config = Config(half=dist.get_rank() == 3)
    one = Step(config)
    for step in range(config.steps):
        one(step)


if __name__ == "__main__":
    main()
