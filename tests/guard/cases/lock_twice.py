# CASE nproc=3 kind=blocked ranks=0 line=@HERE
"""A lock that its own holder takes again, on the rank that reports."""

import threading

import torch
import torch.distributed as dist


class Reporter:
    def __init__(self):
        self.lock = threading.Lock()
        self.lines = []

    def flush(self):
        with self.lock:  # <- HERE
            self.lines.clear()

    def add(self, line):
        with self.lock:
            self.lines.append(line)
            if len(self.lines) > 4:
                self.flush()


def main():
    dist.init_process_group("gloo")
    reporter = Reporter()
    for step in range(10):
        x = torch.ones(10)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            reporter.add(f"step {step}: {x.sum()}")


if __name__ == "__main__":
    main()
