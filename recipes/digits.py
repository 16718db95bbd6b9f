"""Train a small ResNet to read scanned digits, on one rank or on many, with a loop of one's own.

    instep run --nproc 2 recipes/digits.py
    python recipes/digits.py

torchrun, srun and mpirun start it as well. The data are the 1797 handwritten digits that come with scikit-learn
(scans of 8x8 pixels, from the UCI repository). At the same --global-batch every number of ranks gives the same
figures: the loss of each step to 1e-4, and the test accuracy exactly. That is how you know that a distributed
script is right, and it is worth keeping in yours. Needs: pip install 'instep[recipes]'
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import instep

# ---------------------------------------------------------------------------------------------------------------
# The model


class Block(nn.Module):
    """Two convolutions and a way around them; halves the image when `stride` is 2."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        # GroupNorm, not BatchNorm: it looks at one image at a time. BatchNorm would take its statistics from this
        # rank's part of the batch, so the numbers would change with the number of ranks.
        self.norm1 = nn.GroupNorm(4, channels)
        self.norm2 = nn.GroupNorm(4, channels)
        self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, channels, H / stride, W / stride)."""
        # SiLU, not ReLU: at ReLU's kink a rounding error of 1e-7 becomes another gradient, and within a hundred
        # steps another loss (measured: 0.8). A smooth network stays within 1e-6 whatever the order of the sums.
        y = silu(self.norm1(self.conv1(x)))
        return silu(self.norm2(self.conv2(y)) + self.around(x))


def resnet(width: int = 16) -> nn.Module:
    """(N, 1, 8, 8) -> (N, 10), one score per digit."""
    return nn.Sequential(
        Block(1, width, stride=1),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


# ---------------------------------------------------------------------------------------------------------------
# The data


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1440 images to learn from and 357 to be tested on: always the same, each digit as frequent in both."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=357, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


# ---------------------------------------------------------------------------------------------------------------
# One epoch, and the test


def train_epoch(
    model: nn.Module,
    loader: instep.data.ShardedLoader,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> list[float]:
    """Learn from each image once; returns the mean loss of each global batch."""
    model.train()
    sums = []
    for step, (images, labels) in enumerate(loader):
        loss_sum = cross_entropy(model(images.to(device)), labels.to(device), reduction="sum")
        # DDP takes the mean of the ranks' gradients. Times world_size that is their sum; divided by the size of the
        # global batch, the gradient of the mean loss over it: exactly what one process would compute.
        loss = loss_sum * loader.world_size / loader.global_batch_size(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        sums.append(loss_sum.detach().double())
    # One exchange per epoch, not one per step: nobody reads the losses earlier.
    totals = instep.total(torch.stack(sums)).tolist()
    return [total / loader.global_batch_size(step) for step, total in enumerate(totals)]


@torch.no_grad()
def evaluate(model: nn.Module, loader: instep.data.ShardedLoader, device: torch.device) -> dict[str, int]:
    """How many test images are read right, of how many: whole numbers, each image counted once."""
    model.eval()
    count = {"right": 0, "seen": 0}
    for images, labels in loader:
        guesses = model(images.to(device)).argmax(dim=1)
        count["right"] += int((guesses == labels.to(device)).sum())
        count["seen"] += len(labels)
    return instep.total(count)  # sums of counts, never a mean of the ranks' accuracies


# ---------------------------------------------------------------------------------------------------------------
# The program


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small ResNet to read scanned digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=96, help="images per step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.03, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the loss of each step there, as JSON")
    return parser.parse_args()


def main() -> None:
    # Before the arguments: torch.distributed.launch adds one of its own, which init takes away.
    with instep.init() as session:
        args = arguments()
        with instep.main_first():  # where data are downloaded, one rank does it and the others find them
            train_data, test_data = load_data()

        train = instep.shard(train_data, global_batch=args.global_batch, shuffle=True, seed=args.seed, drop_last=True)
        test = instep.shard(test_data, 256)

        torch.manual_seed(args.seed)  # the same first weights on every rank
        net = resnet().to(session.device)
        model = DistributedDataParallel(net) if session.world_size > 1 else net
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * train.steps)

        losses: list[float] = []
        for epoch in range(args.epochs):
            start = time.perf_counter()
            losses += train_epoch(model, train, optimizer, schedule, session.device)
            speed = sum(train.counts()) / (time.perf_counter() - start)
            mean = sum(losses[-train.steps :]) / train.steps
            if session.is_main:
                print(f"epoch {epoch + 1:2}   loss {mean:.4f}   {speed:6.0f} images/s", flush=True)

        # The bare network: DDP's forward pass may wait for the other ranks, and they may have fewer test batches.
        count = evaluate(net, test, session.device)
        if session.is_main:  # a file has one writer
            accuracy = count["right"] / count["seen"]
            if args.losses:
                args.losses.write_text(json.dumps({"losses": losses, **count}))
            print(f"test accuracy {accuracy:.2%} ({count['right']} of {count['seen']} images)")


if __name__ == "__main__":
    main()
