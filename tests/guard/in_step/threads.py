# CONTROL nproc=3 rc=0
"""Two threads talk to the other ranks in two groups, each at its own speed."""

import threading
import time

import torch
import torch.distributed as dist


def save_in_background(group):
    for _ in range(5):
        time.sleep(1)
        dist.all_reduce(torch.ones(100), group=group)


def main():
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1, 2])
    thread = threading.Thread(target=save_in_background, args=(group,))
    thread.start()
    for step in range(40):
        time.sleep(0.01 * dist.get_rank() * (step % 3))
        dist.all_reduce(torch.ones(10))
    thread.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
