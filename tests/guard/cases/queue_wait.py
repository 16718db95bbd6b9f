# CASE nproc=3 kind=blocked|missing ranks=2 line=@HERE
"""The thread that reads ahead has died on one rank; the training thread waits for its next batch."""

import queue
import threading

import torch
import torch.distributed as dist


class Prefetcher:
    def __init__(self, source):
        self.batches = queue.Queue(maxsize=2)
        threading.Thread(target=self.fill, args=(source,), daemon=True).start()

    def fill(self, source):
        for batch in source:
            self.batches.put(batch)

    def next(self):
        return self.batches.get()  # <- HERE


def source(rank):
    for number in range(100):
        if rank == 2 and number == 5:
            raise OSError("read error")
        yield torch.full((10,), float(number))


def main():
    dist.init_process_group("gloo")
    prefetcher = Prefetcher(source(dist.get_rank()))
    for _ in range(100):
        batch = prefetcher.next()
        dist.all_reduce(batch)


if __name__ == "__main__":
    main()
