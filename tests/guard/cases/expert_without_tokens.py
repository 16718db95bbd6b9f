# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""A mixture of experts: the expert that gets no token on a rank is skipped there, and so is its reduction."""

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width + number, bias=False) for number in range(count))

    def forward(self, tokens, choice):
        outputs = []
        for number, expert in enumerate(self.experts):
            mine = tokens[choice == number]
            if mine.shape[0] == 0:  # <- HERE
                continue
            out = expert(mine).sum(dim=0)
            dist.all_reduce(out.detach())
            outputs.append(out.sum())
        return torch.stack(outputs).sum()


def main():
    dist.init_process_group("gloo")
    layer = Experts(4, 8)
    for step in range(10):
        choice = torch.arange(16) % 4
        if step == 4 and dist.get_rank() == 1:
            choice[choice == 2] = 0
        layer(torch.randn(16, 8), choice)
        dist.barrier()


if __name__ == "__main__":
    main()
