# CASE nproc=3 kind=mismatch|missing ranks=1 line=@HERE
"""The `else` of a loop asks all ranks; one rank has found what it looked for before."""

import torch
import torch.distributed as dist


def search(candidates, wanted):
    for candidate in candidates:  # <- HERE
        if candidate == wanted:  # <- HERE
            break
    else:
        dist.all_reduce(torch.tensor(wanted))
        return None
    return candidate


def main():
    dist.init_process_group("gloo")
    mine = [4, 17] if dist.get_rank() == 1 else [40, 170]
    for wanted in range(12):
        dist.broadcast(torch.ones(33), 0)
        search(mine, wanted)


if __name__ == "__main__":
    main()
