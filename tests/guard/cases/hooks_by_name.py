# CASE nproc=3 kind=mismatch|missing|extra ranks=2 line=@HERE
"""Callbacks from a registry: one rank was given a list with another one in it."""

import torch
import torch.distributed as dist

REGISTRY = {}


def register(function):
    REGISTRY[function.__name__] = function
    return function


@register
def average_weights(state):
    dist.all_reduce(state["weights"])


@register
def share_clock(state):
    dist.broadcast(state["clock"], 0)


@register
def count(state):
    state["count"] += 1


def fire(names, state):
    for name in names:
        REGISTRY[name](state)  # <- HERE


def main():
    dist.init_process_group("gloo")
    state = {"weights": torch.ones(10), "clock": torch.ones(1), "count": 0}
    names = ["count", "average_weights", "share_clock"]
    for step in range(10):
        if step == 4 and dist.get_rank() == 2:
            names = ["count", "share_clock", "average_weights"]
        fire(names, state)


if __name__ == "__main__":
    main()
