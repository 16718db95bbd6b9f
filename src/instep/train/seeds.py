"""Random numbers of training: equal where ranks have to be equal, different where they have to differ."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from instep.data.randomness import derive

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_model(seed: int) -> None:
    """Seed torch, numpy and random alike on every rank: for weights that are drawn now."""
    _seed(derive("model", seed))


def seed_training(seed: int, rank: int) -> None:
    """Seed them differently on every rank: for dropout and what else a training step draws."""
    _seed(derive("train", seed, rank))


def _seed(number: int) -> None:
    torch.manual_seed(number)  # all devices
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002  # the global generator is the one that users' code draws from
    random.seed(number)


def make_deterministic() -> None:
    """Let torch use algorithms that give the same bits each time, and raise where it has none.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads nothing else
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def random_states() -> dict[str, Any]:
    """The states of all global generators of this process: tensors and plain values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # as above
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on drawing where :func:`random_states` looked."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kept = states["numpy"]
    np.random.set_state(  # noqa: NPY002  # as above
        ("MT19937", kept["key"].numpy().astype(np.uint32), kept["pos"], kept["has_gauss"], kept["gauss"])
    )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block after which the global generators stand as before it: evaluation does not change training."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)
