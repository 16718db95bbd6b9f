# CASE nproc=3 kind=blocked ranks=2 line=@HERE
"""A file's lock is held by a process that nobody thinks of."""

import fcntl
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist

HOLD = (
    "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(900)"
)


def cached(path):
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # <- HERE
        return file.read()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.NamedTemporaryFile() as file:
        if rank == 2:
            holder = subprocess.Popen([sys.executable, "-c", HOLD, file.name], stdout=subprocess.PIPE)
            holder.stdout.readline()
        for _ in range(4):
            dist.all_reduce(torch.ones(4))
        cached(file.name)
        dist.barrier()


if __name__ == "__main__":
    main()
