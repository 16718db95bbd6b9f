# CASE nproc=3 kind=blocked|missing ranks=1 line=@HERE
"""A library's call that waits for ever and lets no other thread of Python run meanwhile."""

import ctypes

import torch
import torch.distributed as dist


def driver_call():
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # <- HERE


def main():
    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(10))
        if step == 4 and dist.get_rank() == 1:
            driver_call()


if __name__ == "__main__":
    main()
