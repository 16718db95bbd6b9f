# CONTROL nproc=4 rc=0
"""The ranks do the same together from other lines, with other sizes where that is right, late, and in subgroups."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def joined(rank):
    model = DistributedDataParallel(nn.Linear(4, 4))
    with Join([model]):
        for _ in range(5 + 2 * rank):
            model(torch.rand(2, 4)).sum().backward()


def other_lines(rank):
    if rank == 0:
        value = torch.arange(10.0)
        dist.broadcast(value, 0)
    else:
        value = torch.empty(10)
        dist.broadcast(value, 0)
    if rank:
        dist.gather(value, dst=0)
    else:
        dist.gather(value, [torch.empty(10) for _ in range(4)], dst=0)
    assert value[3] == 3


def other_sizes(rank, size):
    objects = [None] * size
    dist.all_gather_object(objects, "x" * (1000 * rank + 1))
    box = [list(range(500))] if rank == 2 else [None]
    dist.broadcast_object_list(box, src=2)
    scattered = [None]
    dist.scatter_object_list(scattered, [list(range(10 * n)) for n in range(size)] if rank == 1 else None, src=1)
    assert len(scattered[0]) == 10 * rank


def late(rank):
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    time.sleep(rank)
    for work in works:
        work.wait()


def subgroups(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = dist.new_group([0, 3])
    for _ in range(2 + rank // 2):
        dist.all_reduce(torch.ones(3 + rank // 2), group=pairs[rank // 2])
    if rank in (0, 3):
        dist.broadcast(torch.ones(7), 3, group=outer)


def messages(rank, size):
    if rank == 0:
        for other in range(1, size):
            dist.recv(torch.empty(other), other)
    else:
        time.sleep(0.5 * rank)
        dist.send(torch.ones(rank), 0)


def parts(rank, size):
    mine = torch.ones(sum(range(1, size + 1)) * (rank + 1))
    splits = [(rank + 1) * (n + 1) for n in range(size)]
    theirs = [(n + 1) * (rank + 1) for n in range(size)]
    out = torch.empty(sum(theirs))
    dist.all_to_all_single(out, mine[: sum(splits)], theirs, splits)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    joined(rank)
    other_lines(rank)
    other_sizes(rank, size)
    late(rank)
    subgroups(rank)
    messages(rank, size)
    parts(rank, size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
