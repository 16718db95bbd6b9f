# CASE nproc=3 kind=blocked|missing ranks=2 line=@HERE
"""A rank waits for the answer of a server that has accepted its connection and says nothing."""

import socket

import torch
import torch.distributed as dist


class Tracker:
    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.connection = socket.create_connection(self.server.getsockname())

    def log(self, values):
        self.connection.sendall(repr(values).encode())
        return self.connection.recv(100)  # <- HERE


def main():
    dist.init_process_group("gloo")
    tracker = Tracker()
    for step in range(20):
        x = torch.ones(10)
        dist.all_reduce(x)
        if step == 4 and dist.get_rank() == 2:
            tracker.log({"step": step, "x": x.sum()})


if __name__ == "__main__":
    main()
