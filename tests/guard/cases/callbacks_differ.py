# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""One rank has one callback more than the others, and it waits for all."""

import torch
import torch.distributed as dist


class Callback:
    def on_epoch_end(self, epoch):
        pass


class Checkpoint(Callback):
    def on_epoch_end(self, epoch):
        dist.barrier()


class Metrics(Callback):
    def on_epoch_end(self, epoch):
        dist.all_reduce(torch.tensor(float(epoch)))


class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks

    def fit(self, epochs):
        for epoch in range(epochs):
            dist.broadcast(torch.ones(50), 0)
            if epoch > 2:
                for callback in self.callbacks:  # <- HERE
                    callback.on_epoch_end(epoch)


def main():
    dist.init_process_group("gloo")
    callbacks = [Metrics()]
    if dist.get_rank() == 0:  # <- HERE
        callbacks.append(Checkpoint())
    Trainer(callbacks).fit(6)


if __name__ == "__main__":
    main()
