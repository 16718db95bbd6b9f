# CASE nproc=3 kind=extra|mismatch|missing ranks=1 line=@HERE
"""A setting that is read from each machine's environment."""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["LOG_EVERY"] = "5"


@dataclass
class Config:
    log_every: int = field(default_factory=lambda: int(os.environ.get("LOG_EVERY", "10")))


class Logger:
    def __init__(self, config):
        self.config = config
        self.sums = torch.zeros(3)

    def log(self, step, values):
        self.sums += values
        if step % self.config.log_every or not step:  # <- HERE
            return None
        dist.all_reduce(self.sums)
        return self.sums / self.config.log_every


def main():
    dist.init_process_group("gloo")
    logger = Logger(Config())
    for step in range(30):
        values = torch.ones(3)
        dist.broadcast(values, 0)
        logger.log(step, values)


if __name__ == "__main__":
    main()
