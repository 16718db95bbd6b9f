# CONTROL nproc=3 rc=0
"""A rank is stopped, as a debugger stops it, and goes on eight seconds later."""

import os
import subprocess

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    for step in range(10):
        dist.all_reduce(torch.ones(100))
        if step == 4 and dist.get_rank() == 1:
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 8; kill -CONT {os.getpid()}"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
