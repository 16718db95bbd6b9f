# CASE nproc=3 kind=extra|mismatch|missing ranks=0 line=@HERE
"""Lightning: a hook of the user's module gathers on the main rank only."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, number):
        if number == 4 and self.trainer.is_global_zero:  # <- HERE
            losses = self.all_gather(outputs["loss"])
            print("losses of all ranks:", losses)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(120, 8)), batch_size=4))


if __name__ == "__main__":
    main()
