# CASE nproc=3 kind=blocked ranks=1 line=@HERE
"""A lock file whose holder is dead: one rank waits for it, the others for that rank."""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist


class FileLock:
    def __init__(self, path):
        self.path = Path(path)

    def __enter__(self):
        while self.path.exists():  # <- HERE
            time.sleep(0.1)  # <- HERE
        self.path.touch()

    def __exit__(self, *error):
        self.path.unlink()


def build_extension(folder):
    with FileLock(folder / "lock"):
        return "built"


def main():
    dist.init_process_group("gloo")
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if dist.get_rank() == 1:
            (folder / "lock").touch()  # as a killed job leaves it, in this node's cache
        build_extension(folder)
        dist.barrier()


if __name__ == "__main__":
    main()
