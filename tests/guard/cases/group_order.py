# CASE nproc=4 kind=cycle|mismatch|missing ranks=2 line=@HERE
"""Two kinds of groups, in another order on one rank."""

import torch
import torch.distributed as dist


class Mesh:
    def __init__(self):
        self.rank = dist.get_rank()
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.row = rows[self.rank // 2]

    def sync_row(self, x):
        dist.all_reduce(x, group=self.row)

    def sync_all(self, x):
        dist.all_reduce(x)


def step(mesh, x, first):
    if first == "row":  # <- HERE
        mesh.sync_row(x)
        mesh.sync_all(x)
    else:
        mesh.sync_all(x)
        mesh.sync_row(x)


def main():
    dist.init_process_group("gloo")
    mesh = Mesh()
    for number in range(10):
        order = "all" if mesh.rank == 2 and number == 4 else "row"
        step(mesh, torch.ones(12), order)


if __name__ == "__main__":
    main()
