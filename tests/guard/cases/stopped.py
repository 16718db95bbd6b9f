# CASE nproc=3 kind=blocked|missing ranks=2 line=@HERE
"""A rank's process is stopped, and nobody lets it go on."""

import os
import signal

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(10))
        if step == 4 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # <- HERE


if __name__ == "__main__":
    main()
