# CASE nproc=3 kind=extra|missing|mismatch ranks=0 line=@HERE
"""A decorator keeps a function to the main rank; one day the function learns to gather."""

import functools

import torch
import torch.distributed as dist


def main_only(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if dist.get_rank() != 0:  # <- HERE
            return None
        return function(*args, **kwargs)

    return wrapped


@main_only
def report(step, loss):
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    print(step, torch.stack(losses).mean())


def main():
    dist.init_process_group("gloo")
    for step in range(1, 11):
        loss = torch.tensor([1.0 / step])
        dist.all_reduce(torch.ones(1000))
        if step % 5 == 0:
            report(step, loss)


if __name__ == "__main__":
    main()
