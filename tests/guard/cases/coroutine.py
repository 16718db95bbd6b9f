# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""An evaluation in coroutines, which one rank leaves by a time limit of its own."""

import asyncio

import torch
import torch.distributed as dist


async def fetch(rank, number):
    await asyncio.sleep(5.0 if rank == 1 and number == 4 else 0.0)
    return torch.full((6,), float(number))


async def evaluate(rank):
    for number in range(8):
        try:
            batch = await asyncio.wait_for(fetch(rank, number), timeout=0.5)
        except asyncio.TimeoutError:  # <- HERE
            continue
        dist.all_reduce(batch)
        dist.broadcast(torch.ones(2), 0)


def main():
    dist.init_process_group("gloo")
    asyncio.run(evaluate(dist.get_rank()))
    dist.barrier()


if __name__ == "__main__":
    main()
