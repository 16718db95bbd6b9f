"""Train a network of torchvision on a folder of images, the way ImageNet is trained today.

    instep run --nproc auto recipes/imagenet.py /data/imagenet --arch resnet50 --epochs 90
    srun python recipes/imagenet.py /shared/imagenet --checkpoints /shared/checkpoints/resnet50 --max-time 23:50:00

The folder has `train/` and `val/`, and in both of them a folder of images for each class (torchvision's ImageFolder).
Started again with the same --checkpoints, training goes on where it was stopped, in the middle of an epoch too.

In it: label smoothing, mixup and cutmix, random crops and flips, cosine after a warm-up, a learning rate that follows
the global batch, no weight decay on biases and norms, an average of the weights for the evaluation, channels-last
memory, mixed precision, and top-1 and top-5 over each image of `val/` exactly once.
Needs: pip install 'instep[vision]'
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import instep
from instep.train import EMA, Accuracy, Callback, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# ---------------------------------------------------------------------------------------------------------------
# The data

PIXELS = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]


def load_data(folder: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    """The images to learn from, another crop of each every time; and those to evaluate with, always the same."""
    if missing := [part for part in ("train", "val") if not (folder / part).is_dir()]:
        raise instep.InstepError(
            f"There is no {' and no '.join(missing)} folder.",
            evidence=[f"looked in {folder.absolute()}"],
            cure="Give the folder that has train/CLASS/*.jpg and val/CLASS/*.jpg in it.",
        )
    crop = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    whole = [v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)]
    train = ImageFolder(str(folder / "train"), v2.Compose([*crop, *PIXELS]))
    val = ImageFolder(str(folder / "val"), v2.Compose([*whole, *PIXELS]))
    if train.classes != val.classes:
        raise instep.InstepError(
            "train/ and val/ do not have the same classes.",
            evidence=[f"in one of them only: {sorted(set(train.classes) ^ set(val.classes))[:10]}"],
        )
    return train, val


# ---------------------------------------------------------------------------------------------------------------
# The model and its step


def make_model(arch: str, classes: int, *, channels_last: bool) -> nn.Module:
    """A network of torchvision, (N, 3, H, W) -> (N, classes). Its convolutions pass channels-last on to the images."""
    model: nn.Module = models.get_model(arch, weights=None, num_classes=classes)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has it, and forgot to say so
    return model


def make_optimizer(lr: float, weight_decay: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Weight decay pulls matrices and filters to zero; biases and the scales of norms are left alone."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [one for one in parameters if one.ndim > 1], "weight_decay": weight_decay},
            {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True)

    return make


class Mixing:
    """A step of training: images are mixed with others of the same batch on the device, and so are their labels.

    What is drawn differs between ranks, and is the same again after a resume: the trainer sees to both.

    Args:
        classes: how many there are.
        smoothing: what part of the label is given to all classes alike.
        mixup: how strongly images are blended, 0: never (arXiv:1710.09412).
        cutmix: how strongly parts of images are exchanged, 0: never (arXiv:1905.04899).

    """

    def __init__(self, classes: int, *, smoothing: float, mixup: float, cutmix: float) -> None:
        kinds = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
        mixes = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha > 0]
        self.mix = v2.RandomChoice(mixes) if mixes else None
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch if self.mix is None else self.mix(*batch)
        return cross_entropy(model(images), labels, label_smoothing=self.smoothing)


# ---------------------------------------------------------------------------------------------------------------
# The program


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    instep.world()  # takes away the argument that torch.distributed.launch adds to ours
    parser = argparse.ArgumentParser(description="Train a network of torchvision on a folder of images.")
    parser.add_argument("data", type=Path, metavar="FOLDER", help="with train/ and val/ in it")
    parser.add_argument("--arch", default="resnet50", help="any classification network of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels, in height and width")
    parser.add_argument("--workers", type=int, default=8, help="data loader processes of each rank")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--steps", type=int, help="end after so many steps; 0: evaluate only")
    parser.add_argument("--batch-size", type=int, default=128, help="images of a forward pass on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes per step")
    parser.add_argument("--lr", type=float, default=0.1, help="for a global batch of 256: it is scaled with the batch")
    parser.add_argument("--warmup-epochs", type=float, default=5.0, help="over which the learning rate rises")
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.2, metavar="ALPHA", help="0: without")
    parser.add_argument("--cutmix", type=float, default=1.0, metavar="ALPHA", help="0: without")
    parser.add_argument("--ema", type=float, default=0.9999, metavar="DECAY", help="0: without")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--strategy", choices=["ddp", "zero1", "fsdp", "hsdp"], default="ddp")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over all ranks (GPUs only)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--max-time", metavar="H:MM:SS", help="save and end with exit code 75 after so long")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    with instep.init() as session:
        train, val = load_data(args.data, args.image_size)
        classes = len(train.classes)
        steps_per_epoch = max(1, len(train) // (args.batch_size * args.accumulate * session.world_size))
        averages: list[Callback] = [EMA(args.ema, buffers="average")] if args.ema > 0 else []
        trainer = Trainer(
            # torch's fully_shard takes only weights that lie in memory in the plain order.
            lambda: make_model(args.arch, classes, channels_last=args.strategy in ("ddp", "zero1")),
            make_optimizer(args.lr, args.weight_decay),
            train,
            training_step=Mixing(classes, smoothing=args.label_smoothing, mixup=args.mixup, cutmix=args.cutmix),
            loss=cross_entropy,  # of the evaluation: of the images and labels as they are
            eval_data=val,
            metrics={"top1": Accuracy(), "top5": Accuracy(top_k=min(5, classes))},
            monitor="top1",
            batch_size_per_rank=args.batch_size,
            accumulate=args.accumulate,
            drop_last=True,  # a last batch of one image would have no variance for BatchNorm
            loader_options={
                "num_workers": args.workers,
                "persistent_workers": args.workers > 0,
                "pin_memory": session.device.type == "cuda",
            },
            epochs=args.epochs,
            steps=args.steps,
            max_time=args.max_time,
            schedule="cosine",
            warmup=math.ceil(args.warmup_epochs * steps_per_epoch),
            scale_lr="linear",
            base_batch=256,
            precision=args.precision,
            strategy=args.strategy,
            sync_batchnorm=args.sync_batchnorm,
            compile=args.compile,
            callbacks=averages,
            checkpoint=args.checkpoints,
            resume="auto" if args.checkpoints else None,
            seed=args.seed,
        )
        trainer.fit()
        if session.is_main:
            results = trainer.results
            print(f"top-1 {results['top1']:.2%}, top-5 {results['top5']:.2%} of {len(val)} images")


if __name__ == "__main__":
    main()
