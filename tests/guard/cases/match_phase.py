# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""A state machine that is in another state on one rank."""

import torch
import torch.distributed as dist


class Machine:
    def __init__(self, rank):
        self.rank, self.state, self.step = rank, "warm-up", 0

    def advance(self):
        self.step += 1
        limit = 3 if self.rank == 1 else 4
        if self.step > limit:
            self.state = "train"

    def run(self):
        match self.state:  # <- HERE
            case "warm-up":
                dist.all_reduce(torch.ones(4))
            case "train":  # <- HERE
                dist.broadcast(torch.ones(100), 0)
            case _:
                raise AssertionError


def main():
    dist.init_process_group("gloo")
    machine = Machine(dist.get_rank())
    while machine.step < 20:
        machine.advance()
        machine.run()


if __name__ == "__main__":
    main()
