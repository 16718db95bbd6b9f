"""Random states of our own, so that what the data draws depends on seeds alone and disturbs nobody."""

from __future__ import annotations

import hashlib
import random
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")

_States = tuple[torch.Tensor, Any, Any]


def derive(purpose: str, *numbers: int) -> int:
    """A 63-bit seed for one purpose; neighbouring numbers give unrelated seeds (``seed + epoch`` would not)."""
    text = ":".join(["instep", purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def fresh(generator: object, seed: int) -> Any:
    """A new generator of the same kind, seeded; None for anything that is no random generator."""
    match generator:
        case torch.Generator():
            return torch.Generator(generator.device).manual_seed(seed)
        case np.random.Generator():
            return np.random.Generator(type(generator.bit_generator)(seed))
        case np.random.RandomState():
            return np.random.RandomState(_words(seed))
        case random.Random() if type(generator) is random.Random:
            return random.Random(seed)  # noqa: S311  # not for secrets
        case _:
            return None


class Randomness:
    """The global random states of torch (CPU), numpy and random, seeded apart and in force only inside ``with``.

    Entered again it goes on where it left off; outside, the program finds its own states as they were. The random
    generators that `owners` keep as attributes are replaced for the same time: a sampler that was given
    ``generator=...`` draws from ours inside, and has its own back afterwards.
    """

    def __init__(self, seed: int, owners: Iterable[object] = ()) -> None:
        self._inside: _States = (
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(_words(seed)).get_state(legacy=False),
            random.Random(seed).getstate(),  # noqa: S311  # not for secrets
        )
        self._outside: _States | None = None
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        for owner in owners:
            attributes = getattr(owner, "__dict__", {})
            for name, value in attributes.items():
                if (ours := fresh(value, derive(name, seed, len(self._slots)))) is not None:
                    self._slots.append((attributes, name, ours))

    def __enter__(self) -> None:
        self._outside = _states()
        _put(self._inside)
        self._exchange()

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None
        self._exchange()
        self._inside = _states()
        _put(self._outside)

    def stay(self) -> None:
        """Put these states in force for good: for a worker process, whose states are nobody else's."""
        _put(self._inside)

    def _exchange(self) -> None:
        self._slots = [(attributes, name, _swap(attributes, name, ours)) for attributes, name, ours in self._slots]


def within(around: Callable[[], AbstractContextManager[None]], source: Iterable[T], block: int) -> Iterator[T]:
    """The items of `source`, read inside `around`, a block at a time: entering it costs a tenth of a millisecond."""
    with around():
        items = iter(source)
    return _in_blocks(around, items, block)


def _in_blocks(around: Callable[[], AbstractContextManager[None]], items: Iterator[T], block: int) -> Iterator[T]:
    while True:
        with around():
            read = list(islice(items, block))
        yield from read
        if len(read) < block:
            return


def _swap(attributes: dict[str, Any], name: str, value: object) -> Any:
    before, attributes[name] = attributes[name], value
    return before


def _states() -> _States:
    # The legacy global generator is the one that users' samplers and augmentations draw from.
    return torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002


def _put(states: _States) -> None:
    # torch.set_rng_state, not manual_seed: that one would seed the accelerators too.
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def _words(seed: int) -> list[int]:
    return [seed & 0xFFFFFFFF, seed >> 32]
