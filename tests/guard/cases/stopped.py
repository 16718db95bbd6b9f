# CASE nproc=3 kind=blocked|missing ranks=2 line=@HERE
"""A rank's process is stopped by somebody, who does not let it go on."""

import os
import subprocess
import time

import torch
import torch.distributed as dist


def load(step):
    if step == 4 and dist.get_rank() == 2:
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}"])
        time.sleep(1.0)  # <- HERE
    return torch.ones(10)


def main():
    dist.init_process_group("gloo")
    for step in range(20):
        x = load(step)
        dist.all_reduce(x)


if __name__ == "__main__":
    main()
