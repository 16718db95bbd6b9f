# CASE nproc=3 kind=mismatch|missing ranks=0 line=@HERE
"""A value that is reduced when it is first asked for; one rank has it from a file."""

import torch
import torch.distributed as dist


class Normalizer:
    def __init__(self, known=None):
        self._mean = known

    @property
    def mean(self):
        if self._mean is None:  # <- HERE
            total = torch.tensor([10.0, 4.0])
            dist.all_reduce(total)
            self._mean = total[0] / total[1]
        return self._mean

    def __call__(self, x):
        return x - self.mean


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.broadcast(torch.ones(3), 0)
    normalizer = Normalizer(torch.tensor(2.5) if dist.get_rank() == 0 else None)
    for _ in range(3):
        x = normalizer(torch.rand(20, 2))
        dist.broadcast(x, 0)


if __name__ == "__main__":
    main()
