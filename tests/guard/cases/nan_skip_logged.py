# CASE nproc=4 kind=mismatch ranks=2 line=@HERE
"""The skipped step is noticed at once: the loss is reduced for the log in each step, gradients by hand."""

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self):
        self.weight = torch.zeros(50, requires_grad=True)
        self.rank = dist.get_rank()

    def loss_of(self, step):
        data = torch.randn(50)
        if self.rank == 2 and step == 4:
            data = data / 0.0
        return ((self.weight - data) ** 2).mean()

    def update(self, loss):
        self.weight.grad = None
        loss.backward()
        dist.all_reduce(self.weight.grad)
        with torch.no_grad():
            self.weight -= 0.1 * self.weight.grad / dist.get_world_size()

    def mean_of(self, loss):
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    def fit(self):
        for step in range(20):
            loss = self.loss_of(step)
            if loss.isfinite():  # <- HERE
                self.update(loss)
            self.mean_of(loss)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit()
    dist.destroy_process_group()
