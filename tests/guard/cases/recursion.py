# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""A tree that is walked together, and is a level deeper on some ranks."""

import torch
import torch.distributed as dist


class Node:
    def __init__(self, depth):
        self.value = torch.ones(depth + 1)
        self.children = [Node(depth - 1) for _ in range(2)] if depth else []


def reduce(node):
    dist.all_reduce(node.value)
    if not node.children:  # <- HERE
        return 1
    return 1 + sum(reduce(child) for child in node.children)


def main():
    dist.init_process_group("gloo")
    tree = Node(3)
    if dist.get_rank() == 1:
        tree.children[0].children[1].children = []
    for _ in range(3):
        reduce(tree)
        dist.barrier()


if __name__ == "__main__":
    main()
