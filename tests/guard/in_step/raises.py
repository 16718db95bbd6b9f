# CONTROL nproc=3 rc=1
"""A rank fails with an error that it shows: that is a failure of the script, whoever waits for it."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(10):
        if step == 4 and dist.get_rank() == 1:
            raise ValueError("the loss is negative")
        dist.all_reduce(torch.ones(10))


if __name__ == "__main__":
    main()
