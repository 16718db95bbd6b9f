# CONTROL nproc=2 rc=0
"""The main rank reads from a slow server, a little at a time."""

import socket
import sys
import threading
import time

import torch
import torch.distributed as dist


def serve(server, chunks):
    connection, _ = server.accept()
    with connection:
        for _ in range(chunks):
            connection.sendall(b"x" * 1000)
            time.sleep(0.5)


def download(address):
    data = b""
    with socket.create_connection(address) as connection:
        while chunk := connection.recv(1000):
            data += chunk
    return data


def main(chunks=30):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve, args=(server, chunks), daemon=True).start()
        assert len(download(server.getsockname())) == chunks * 1000
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
