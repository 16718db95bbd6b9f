"""Train a ResNet on CIFAR-10, or on synthetic images to see how fast it goes.

    instep run --nproc auto recipes/cifar10_resnet.py --arch resnet50 --epochs 30
    instep run --nproc 2 recipes/cifar10_resnet.py --synthetic --arch resnet18 --steps 3
    instep run --nproc auto recipes/cifar10_resnet.py --checkpoints checkpoints/cifar10     # again: it goes on

After each epoch the main rank prints the samples per second of all ranks together: the samples of the steps that were
timed by the time of those steps, evaluation left out. The first steps of a run are not timed: in them libraries choose
their algorithms, memory is allocated, and workers start. How many those are is printed beside the figure.

BatchNorm looks at the images of one rank, so the numbers depend a little on the number of ranks; on GPUs
--sync-batchnorm ends that. Needs: pip install 'instep[vision]'
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision import models
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

import instep
from instep.train import Accuracy, Callback, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

# ---------------------------------------------------------------------------------------------------------------
# The model


def resnet(arch: str, stem: str) -> nn.Module:
    """A ResNet of torchvision for ten classes; (N, 3, H, W) -> (N, 10)."""
    model: nn.Module = models.get_model(arch, weights=None, num_classes=10)
    if stem == "cifar":
        # torchvision's begins with two steps of halving, made for 224 pixels: of 32 it leaves 8 for the first block.
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


# ---------------------------------------------------------------------------------------------------------------
# The data

PIXELS = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
]
AUGMENTED = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *PIXELS])
PLAIN = v2.Compose(PIXELS)  # a test is of the images as they are


def cifar10(folder: Path) -> tuple[Dataset[object], Dataset[object]]:
    """50,000 images to learn from and 10,000 to be tested on; downloaded by the main rank if they are not there."""
    with instep.main_first():
        try:
            train = CIFAR10(folder, train=True, transform=AUGMENTED, download=instep.is_main())
            test = CIFAR10(folder, train=False, transform=PLAIN)
        except (OSError, RuntimeError) as error:
            raise instep.InstepError(
                "CIFAR-10 is not there, and could not be downloaded.",
                evidence=[f"looked in {folder.absolute()}", f"{type(error).__name__}: {error}"],
                cure="Unpack cifar-10-python.tar.gz there, name another folder with --data,\n"
                "or take synthetic images:  --synthetic",
            ) from None
    return train, test


class Synthetic(Dataset[tuple[Tensor, int]]):
    """Noise that costs nothing to read: a few images over and over, the same on every rank."""

    def __init__(self, length: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length = length
        self.images = torch.randn(64, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.images[index % len(self.images)], index % 10


# ---------------------------------------------------------------------------------------------------------------
# How fast


class Speed(Callback):
    """Prints the samples per second of each epoch, without the first steps of the run.

    Args:
        skip: how many steps of the run are not timed.

    """

    ranks = "main"  # it only writes, and every step waits for all ranks: their time is this rank's

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.left_out = 0
        self.last = (0, 0, 0.0)  # steps, samples, and seconds at the end of the step before the first that is timed

    def on_fit_start(self, trainer: Trainer) -> None:
        self.skip_until = trainer.progress.step + self.skip

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.left_out = 0
        self.is_open = True
        self.mark(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step <= self.skip_until:
            self.left_out += 1
            self.mark(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.close(trainer)

    def on_evaluate_start(self, trainer: Trainer) -> None:
        self.close(trainer)  # an epoch that --steps has cut short has no end of its own

    def mark(self, trainer: Trainer) -> None:
        self.last = (trainer.progress.step, trainer.progress.samples, self.now(trainer))

    def close(self, trainer: Trainer) -> None:
        if not self.is_open:
            return
        self.is_open = False
        step, samples, since = self.last
        steps = trainer.progress.step - step  # a number of steps, not the index of the last one
        speed = (trainer.progress.samples - samples) / (self.now(trainer) - since)
        left_out = f"; the first {self.left_out} not timed" if self.left_out else ""
        text = f"{speed:.1f} samples/s over {steps} steps{left_out}" if steps else "no step was timed"
        print(f"speed: {text}", flush=True)

    @staticmethod
    def now(trainer: Trainer) -> float:
        if trainer.session.device.type == "cuda":
            torch.cuda.synchronize()  # the steps are only queued so far
        return time.perf_counter()


# ---------------------------------------------------------------------------------------------------------------
# The program


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    instep.world()  # takes away the argument that torch.distributed.launch adds to ours
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 or on synthetic images.")
    parser.add_argument("--arch", choices=["resnet18", "resnet50", "resnet101", "resnet152"], default="resnet50")
    parser.add_argument("--stem", choices=["imagenet", "cifar"], default="imagenet", help="cifar: made for 32 pixels")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10")
    parser.add_argument("--synthetic", action="store_true", help="noise in place of CIFAR-10")
    parser.add_argument("--image-size", type=int, default=32, help="pixels of a synthetic image")
    parser.add_argument("--batch-size", type=int, default=128, help="images of a step on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes per step")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="end after so many steps")
    parser.add_argument("--lr", type=float, default=0.1, help="for a global batch of 256: it is scaled with the batch")
    parser.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="over which the learning rate rises")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--strategy", choices=["ddp", "zero1", "fsdp", "hsdp"], default="ddp")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over all ranks (GPUs only)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--workers", type=int, default=2, help="data loader processes of each rank")
    parser.add_argument("--untimed", type=int, default=10, metavar="STEPS", help="at the start, for samples per second")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--resume", default="auto", metavar="WHICH", help="auto, latest, best, or a path")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    with instep.init() as session:
        if args.synthetic:
            train: Dataset[object] = Synthetic(50_000, args.image_size)
            test: Dataset[object] = Synthetic(256, args.image_size)
        else:
            train, test = cifar10(args.data)
        untimed = args.untimed if args.steps is None else min(args.untimed, args.steps // 2)
        trainer = Trainer(
            lambda: resnet(args.arch, args.stem),
            lambda parameters: torch.optim.SGD(parameters, args.lr, momentum=0.9, weight_decay=5e-4),
            train,
            loss=cross_entropy,
            eval_data=test,
            metrics={"accuracy": Accuracy()},
            monitor="accuracy",
            batch_size_per_rank=args.batch_size,
            accumulate=args.accumulate,
            drop_last=True,  # a last batch of one image would have no variance for BatchNorm
            loader_options={
                "num_workers": 0 if args.synthetic else args.workers,
                "persistent_workers": args.workers > 0 and not args.synthetic,
                "pin_memory": session.device.type == "cuda",
            },
            epochs=args.epochs,
            steps=args.steps,
            schedule="cosine",
            warmup=args.warmup,
            scale_lr="linear",
            base_batch=256,
            precision=args.precision,
            strategy=args.strategy,
            sync_batchnorm=args.sync_batchnorm,
            compile=args.compile,
            callbacks=[Speed(untimed)],
            checkpoint=args.checkpoints,
            resume=args.resume if args.checkpoints else None,
            seed=args.seed,
        )
        trainer.fit()
        if session.is_main:
            accuracy = trainer.results["accuracy"]
            print(f"test accuracy {accuracy:.2%} after {trainer.progress.step} steps")


if __name__ == "__main__":
    main()
