"""A small folder of real images, in the layout of ImageNet: made of the photos and scans that come with scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 40


def write_image_folder(folder: Path, *, train: int, val: int) -> None:
    """Write `train` and `val` images of each of six classes: two photos in patches, four digits enlarged.

    Args:
        folder: gets ``train/CLASS/*.png`` and ``val/CLASS/*.jpg``.
        train: images of each class to learn from.
        val: images of each class to evaluate with, none of them among the others.

    """
    china, flower = load_sample_images().images
    digits = load_digits()
    classes = {"temple": _patches(china), "flower": _patches(flower)}
    classes |= {f"digit-{digit}": _scans(digits.images[digits.target == digit]) for digit in range(4)}
    for name, images in classes.items():
        assert len(images) >= train + val, f"{name} has only {len(images)} images"
        chosen = np.random.default_rng(0).permutation(len(images))[: train + val]
        for number, at in enumerate(chosen):
            part, kind = ("train", "png") if number < train else ("val", "jpg")
            file = folder / part / name / f"{number:03}.{kind}"
            file.parent.mkdir(parents=True, exist_ok=True)
            images[at].save(file)


def _patches(photo: np.ndarray) -> list[Image.Image]:
    height, width = photo.shape[:2]
    corners = [(y, x) for y in range(0, height - SIDE, SIDE) for x in range(0, width - SIDE, SIDE)]
    return [Image.fromarray(photo[y : y + SIDE, x : x + SIDE]) for y, x in corners]


def _scans(scans: np.ndarray) -> list[Image.Image]:
    images = [Image.fromarray((scan * 255 / 16).astype(np.uint8)).convert("RGB") for scan in scans]
    return [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images]
