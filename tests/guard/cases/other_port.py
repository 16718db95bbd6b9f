# CASE nproc=3 kind=blocked|missing|mismatch ranks=1|0,1,2 line=@HERE
"""One rank looks for the others at a port where nobody is."""

import os

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 7)


def main():
    dist.init_process_group("gloo")  # <- HERE
    for _ in range(10):
        dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
