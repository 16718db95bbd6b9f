# CASE nproc=3 kind=missing|mismatch ranks=1 line=@HERE
"""A file that one rank does not see yet: it takes no part in loading what the others load."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


class SharedFolder:
    """A folder on a file system that is slow to show files on some machines."""

    def __init__(self, path, lagging):
        self.path, self.lagging = Path(path), lagging

    def exists(self, name):
        return (self.path / name).exists() and not self.lagging


def resume(folder):
    state = [None]
    if folder.exists("last.pt"):  # <- HERE
        if dist.get_rank() == 0:
            state = [torch.load(folder.path / "last.pt")]
        dist.broadcast_object_list(state, src=0)
    return state[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    with tempfile.TemporaryDirectory() as path:
        folder = SharedFolder(path, lagging=rank == 1)
        torch.save({"step": 4}, folder.path / "last.pt")
        resume(folder)
        for _ in range(4):
            dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
