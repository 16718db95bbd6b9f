# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""Main process first, written wrong: the barrier is inside the branch of the main process."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def tokenize(folder):
    Path(folder, "tokens.txt").write_text("a b c")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    grads = torch.ones(100)
    for _ in range(args.steps):
        dist.all_reduce(grads)
        grads /= dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:  # <- HERE
            tokenize(folder)
            dist.barrier()
        dist.all_reduce(grads)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
