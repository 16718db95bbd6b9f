# CASE nproc=3 kind=blocked|missing ranks=0 line=@HERE
"""The main rank waits for a command that never ends."""

import subprocess
import sys

import torch
import torch.distributed as dist


def upload(path):
    command = [sys.executable, "-c", "import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()", path]
    subprocess.run(command, check=True)  # <- HERE


def main():
    dist.init_process_group("gloo")
    for step in range(20):
        dist.all_reduce(torch.ones(10))
        if step % 5 == 4 and dist.get_rank() == 0:
            upload("/dev/null")


if __name__ == "__main__":
    main()
