# CASE nproc=3 kind=mismatch|missing ranks=0 line=@HERE
"""`suppress` around more than was meant: a missing file also takes a reduction with it."""

import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist


class Cache:
    def __init__(self, folder):
        self.folder = Path(folder)

    def load(self, step):
        return torch.load(self.folder / f"{step}.pt")


def main():
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        for step in range(10):
            if step != 4 or dist.get_rank() != 0:
                torch.save(torch.ones(5), f"{folder}/{step}.pt")
        for step in range(10):
            with suppress(FileNotFoundError):  # <- HERE
                statistics = cache.load(step)  # <- HERE
                dist.all_reduce(statistics)
            dist.barrier()


if __name__ == "__main__":
    main()
