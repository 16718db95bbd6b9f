"""Random states of our own, so that what the data draws depends on seeds alone and disturbs nobody."""

from __future__ import annotations

import ctypes
import hashlib
import random
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")

_MERSENNE_BYTES = 4 * 624 + 4  # of its state: the words, and how many of them are used up

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

    def _exchange(self) -> None:
        self._slots = [(attributes, name, _swap(attributes, name, ours)) for attributes, name, ours in self._slots]


class Kept:
    """Whatever is done to the global random states inside ``with``, outside the program finds them as they were."""

    def __init__(self) -> None:
        self._numpy = _NumpyKept()

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy.save()

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        self._numpy.put_back()


class _NumpyKept:
    """The state of numpy's legacy global generator, saved and put back in 5 µs: get_state and set_state take 70.

    The words of a Mersenne Twister are read and written where they lie; ``ctypes.state_address`` is there for that.
    What lies elsewhere is the second half of a pair of Gaussian numbers: while the words stand as we left them, and
    there was none, there is none. (It would have to be put there by a ``set_state`` to the very same words.)
    """

    def __init__(self) -> None:
        self._words = b""
        self._state: dict[str, Any] = {}
        self._address = 0

    def save(self) -> None:
        self._address = _mersenne_address()
        words = ctypes.string_at(self._address, _MERSENNE_BYTES) if self._address else b""
        if not words or words != self._words or self._state["has_gauss"]:
            self._words, self._state = words, np.random.get_state(legacy=False)  # noqa: NPY002

    def put_back(self) -> None:
        if not self._words or self._state["has_gauss"] or self._address != _mersenne_address():
            np.random.set_state(self._state)  # noqa: NPY002
        else:
            np.random.seed(0)  # noqa: NPY002  # forgets half a pair that was drawn inside
            ctypes.memmove(self._address, self._words, _MERSENNE_BYTES)


def _mersenne_address() -> int:
    """Where the words of numpy's global generator lie; 0 if it is of another kind, or numpy is older than 1.24."""
    generator = getattr(np.random, "get_bit_generator", lambda: None)()
    return int(generator.ctypes.state_address) if type(generator) is np.random.MT19937 else 0


def reseed(seed: int) -> None:
    """Seed the global random states anew; they stay so: for a worker process, or inside :class:`Kept`."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the accelerators too
    np.random.seed(_words(seed))  # noqa: NPY002
    random.seed(seed)


def within(
    around: Callable[[], AbstractContextManager[None]], source: Iterable[T], block: int, most: int | None = None
) -> Iterator[T]:
    """The items of `source`, read inside `around`, a block at a time: entering it costs a tenth of a millisecond.

    Args:
        around: makes what to enter.
        source: what to read; its ``iter()`` is called now.
        block: items read at once.
        most: the blocks double up to that many items; None: they do not grow.

    """
    with around():
        items = iter(source)
    return chain.from_iterable(_blocks(around, items, block, most or block))


def _blocks(
    around: Callable[[], AbstractContextManager[None]], items: Iterator[T], block: int, most: int
) -> Iterator[list[T]]:
    while True:
        with around():
            read = list(islice(items, block))
        yield read
        if len(read) < block:
            return
        block = min(2 * block, most)


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
