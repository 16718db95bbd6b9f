# CONTROL nproc=3 rc=0
"""The first step is compiled, by children, and takes some ranks much longer than others."""

import subprocess
import sys

import torch
import torch.distributed as dist

COMPILER = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: sum(range(1000))"


def compile_for(seconds):
    children = [subprocess.Popen([sys.executable, "-c", COMPILER.format(seconds)]) for _ in range(2)]
    for child in children:
        assert child.wait() == 0


def main(seconds=7.0):
    dist.init_process_group("gloo")
    for step in range(4):
        if step == 0 and dist.get_rank() != 0:
            compile_for(seconds * dist.get_rank())
        dist.all_reduce(torch.ones(100))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
