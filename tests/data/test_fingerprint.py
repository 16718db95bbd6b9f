"""A fingerprint tells other data, and is the same in every process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from instep.data import fingerprint
from tests.data.cases import Augmented, Numbers, SizedStream, Stream
from tests.data.test_order import states
from tests.harness import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return self.items[index]


class InMemory(Items):
    def __init__(self, scale: float) -> None:
        super().__init__(1, 2, 3)
        self.x = scale * torch.arange(3)
        self.y = np.arange(3)


class OwnGenerator(Numbers):
    """Draws from a generator that no seed reaches."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept = [np.random.default_rng()]

    def __getitem__(self, index: int) -> Any:
        return self.kept[0].random()


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError(index)


def tensors(scale: float) -> TensorDataset:
    return TensorDataset(scale * torch.arange(6.0).reshape(3, 2), torch.tensor([1, 0, 1]))


IMAGE = np.arange(12, dtype=np.uint8).reshape(3, 4)

# Two of a kind that differ: length, class, content.
DIFFERENT: dict[str, Callable[[], tuple[Any, Any]]] = {
    "length": lambda: (Numbers(3), Numbers(4)),
    "class": lambda: (Numbers(3), Augmented(3)),
    "streams": lambda: (SizedStream(3), SizedStream(4)),
    "a stream without a length": lambda: (Stream(3), SizedStream(3)),
    "tensors": lambda: (tensors(1), tensors(2)),
    "a tensor": lambda: (torch.arange(3), torch.arange(3).int()),
    "bfloat16": lambda: (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    "an array": lambda: (np.arange(3), np.arange(3)[::-1]),
    "a list": lambda: ([1, 2, 3], [1, 2, 4]),
    "a list of dicts": lambda: ([{"a": [1.0, "x"]}], [{"a": [1.0, "y"]}]),
    "a subset": lambda: (Subset(tensors(1), [0, 1]), Subset(tensors(1), [0, 2])),
    "a subset of others": lambda: (Subset(tensors(1), [0, 1]), Subset(tensors(2), [0, 1])),
    "several": lambda: (ConcatDataset([tensors(1), Numbers(2)]), ConcatDataset([tensors(2), Numbers(2)])),
    "attributes": lambda: (InMemory(1), InMemory(2)),
}
# And what differs only when it is read.
READ: dict[str, Callable[[], tuple[Any, Any]]] = {
    "numbers": lambda: (Items(1, 2), Items(1, 3)),
    "kinds of numbers": lambda: (Items(1, 2), Items(1, 2.0)),
    "strings": lambda: (Items("a"), Items("b")),
    "bytes": lambda: (Items(b"a"), Items(b"b")),
    "sets": lambda: (Items({"a", "b"}), Items({"a", "c"})),
    "nested": lambda: (Items({"x": (torch.ones(2), None)}), Items({"x": (torch.zeros(2), None)})),
    "arrays": lambda: (Items(IMAGE), Items(IMAGE + np.uint8(1))),
    "tuples are no lists": lambda: (Items((1, 2)), Items([1, 2])),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_data_have_another_fingerprint(case: str) -> None:
    one, other = DIFFERENT[case]()

    assert fingerprint(one) == fingerprint(DIFFERENT[case]()[0])
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("case", READ)
def test_other_samples_have_another_fingerprint(case: str) -> None:
    one, other = READ[case]()

    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one, read=True) == fingerprint(READ[case]()[0], read=True)
    assert fingerprint(one, read=True) != fingerprint(other, read=True)


def test_nothing_is_fetched_unless_asked_for() -> None:
    items = Items(*range(9))

    fingerprint(items)
    assert items.fetched == []
    fingerprint(items, read=True)
    assert items.fetched == 2 * [0, 4, 8]


def test_random_items_do_not_disturb() -> None:
    before = states()

    assert fingerprint(Augmented(5), read=True) == fingerprint(Augmented(5), read=True)
    assert states() == before


@pytest.mark.parametrize("dataset", [OwnGenerator(3), Failing(3), Items(object()), Items(lambda: 0), {"a": 1}])
def test_what_is_not_stable_is_left_out(dataset: Any) -> None:
    first = fingerprint(dataset, read=True)

    torch.rand(1), random.random()
    assert fingerprint(dataset, read=True) == first


def everything() -> list[str]:
    pairs = [make()[0] for make in (*DIFFERENT.values(), *READ.values())]
    return [fingerprint(data, read=True) for data in [*pairs, Augmented(4), OwnGenerator(3)]]


def test_it_is_the_same_in_other_processes() -> None:
    one, two = run_ranks(everything, 2)

    assert one == two == everything()
