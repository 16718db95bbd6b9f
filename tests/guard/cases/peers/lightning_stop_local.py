# CASE nproc=3 kind=missing|mismatch|dead ranks=1 line=@HERE
"""Lightning: a callback of the user stops the training of its own rank, by its own loss."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class StopAtPlateau(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        loss = outputs["loss"].item()
        if trainer.global_rank == 1 and number == 5:
            loss = 0.0
        if loss < 1e-9:
            trainer.should_stop = True  # <- HERE


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[StopAtPlateau()],
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(120, 8)), batch_size=4))  # <- HERE


if __name__ == "__main__":
    main()
