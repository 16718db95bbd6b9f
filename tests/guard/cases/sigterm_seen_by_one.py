# CASE nproc=3 kind=mismatch|missing|extra ranks=0 line=@HERE
"""A signal reaches one rank: it saves and leaves its loop, the others go on."""

import os
import signal

import torch
import torch.distributed as dist

stop = False


def ask_to_stop(number, frame):
    global stop
    stop = True


def save(weights):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"weights": weights})
    return gathered


def main():
    signal.signal(signal.SIGUSR1, ask_to_stop)
    dist.init_process_group("gloo")
    weights, step = torch.ones(300), 0
    while step < 100:
        dist.all_reduce(weights)
        weights /= weights.sum()
        if dist.get_rank() == 0 and step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)  # the scheduler tells only the first process of a job
        if stop:  # <- HERE
            save(weights)
            break
        step += 1
    dist.barrier()


if __name__ == "__main__":
    main()
