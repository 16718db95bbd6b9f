"""The first program on several ranks: the main rank sends a tensor to each other rank, who says that it has it.

On this machine, with any one of:

    instep run --nproc 3 recipes/message_passing.py
    torchrun --nproc-per-node 3 recipes/message_passing.py
    python -m torch.distributed.launch --nproc-per-node 3 recipes/message_passing.py
    mpirun -np 3 python recipes/message_passing.py
    python recipes/message_passing.py --spawn 3 --init-method tcp://127.0.0.1:29400
    python recipes/message_passing.py --spawn 3 --init-method file:///tmp/a-new-file

On a cluster with Slurm: one task for each rank, or one task for each machine that then starts its ranks itself:

    srun -N2 --ntasks-per-node=2 python recipes/message_passing.py
    srun -N2 --ntasks-per-node=1 python recipes/message_passing.py --spawn 2
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import instep

if TYPE_CHECKING:
    from instep.comm import Session


def main() -> None:
    instep.world()  # takes away the argument that torch.distributed.launch adds to ours: --local-rank=N
    parser = argparse.ArgumentParser(description="The main rank sends a tensor to each other rank.")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="how tensors travel (default: by device)")
    parser.add_argument("--init-method", help="where the ranks meet: env://, tcp://HOST:PORT or file:///PATH")
    parser.add_argument("--spawn", type=int, default=0, metavar="N", help="start N ranks from this process")
    args = parser.parse_args()
    if args.spawn:
        mp.spawn(spawned, args=(args,), nprocs=args.spawn)
    else:
        with instep.init(args.init_method, backend=args.backend) as session:
            pass_messages(session)


def spawned(local_rank: int, args: argparse.Namespace) -> None:
    place = {"local_rank": local_rank, "local_world_size": args.spawn}
    with instep.init(args.init_method, backend=args.backend, **place) as session:
        pass_messages(session)


def pass_messages(session: Session) -> None:
    rank, world_size = session.rank, session.world_size
    said = ""
    if world_size == 1:
        print("rank 0 is alone: there is nobody to send data to", flush=True)
    elif session.is_main:
        for other in range(1, world_size):
            dist.send(message_for(other, session.device), dst=other)
            print(f"rank 0 sent data to rank {other}", flush=True)
    else:
        received = torch.zeros(4, device=session.device)
        dist.recv(received, src=0)
        if not torch.equal(received, message_for(rank, session.device)):
            sys.exit(f"rank {rank} has received wrong data from rank 0: {received.tolist()}")
        said = f"rank {rank} has received data from rank 0"
        print(said, flush=True)

    # A launcher may show the output of the main rank only: let it repeat what the others have said.
    heard = instep.gather_objects(said)
    if session.is_main:
        for words in heard[1:]:
            print(f"rank 0 heard: {words}", flush=True)


def message_for(rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(4, device=device) + 10.0 * rank  # rank 2: [20, 21, 22, 23]


if __name__ == "__main__":
    main()
