# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""Accelerate: the main process gathers the predictions that it wants to print."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(accelerator, model, batch):
    predictions = model(batch)
    if accelerator.is_main_process:  # <- HERE
        everything = accelerator.gather(predictions)
        print("predictions of all:", everything.shape)


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            evaluate(accelerator, model, batch)


if __name__ == "__main__":
    main()
