"""The order of the samples, found again: the inverse of how they were dealt out."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, strategies as st

from instep.data.partition import Partition
from instep.train.gathering import Dealing
from instep.train.trees import Branch, Items, Rows, columns, decided, describe, join, rows_of, size_of, unify


@given(units=st.integers(0, 60), world_size=st.integers(1, 6), block=st.integers(1, 20), drop_last=st.booleans())
def test_order_is_the_inverse_of_the_partition(units: int, world_size: int, block: int, drop_last: bool) -> None:
    partition = Partition(world_size, block, drop_last)
    dealt = [[unit for _, mine in partition.share(range(units), rank) for unit in mine] for rank in range(world_size)]
    order = Dealing(world_size, block).order([[1] * len(mine) for mine in dealt])
    below = torch.tensor([unit for mine in dealt for unit in mine], dtype=torch.int64)
    assert (below if order is None else below[order]).tolist() == list(range(partition.kept(units)))


@given(rows=st.lists(st.integers(0, 4), max_size=30), world_size=st.integers(1, 5))
def test_batches_of_any_number_of_rows_are_put_in_order(rows: list[int], world_size: int) -> None:
    batches = [[(number, row) for row in range(size)] for number, size in enumerate(rows)]
    dealt = [batches[rank::world_size] for rank in range(world_size)]
    order = Dealing(world_size, 7).of_batches().order([[len(one) for one in mine] for mine in dealt])
    below = [row for mine in dealt for one in mine for row in one]
    found = below if order is None else [below[place] for place in order.tolist()]
    assert found == [row for one in batches for row in one]


def test_data_of_their_own_stay_rank_by_rank() -> None:
    assert Dealing(3, 2, shared=False).order([[1, 1], [], [1]]) is None


def joined(batches: list[Any], sizes: list[int]) -> Any:
    """The first column of all batches."""
    spec = decided(unify([describe(one, size, "outputs") for one, size in zip(batches, sizes, strict=True)], "outputs"))
    pieces = [next(columns(one, spec, size)) for one, size in zip(batches, sizes, strict=True)]
    found = join(pieces, Rows(torch.float32, ()) if isinstance(pieces[0], torch.Tensor) else Items())
    return (
        found.tolist()
        if isinstance(found, torch.Tensor)
        else [getattr(one, "tolist", lambda one=one: one)() for one in found]
    )


def test_a_list_is_read_by_what_other_batches_say() -> None:
    zeros, ones = torch.zeros, torch.ones
    # Two outputs: only the second batch, of three samples, shows it.
    assert joined([[zeros(2), ones(2)], [zeros(3), ones(3)]], [2, 3]) == [0.0] * 5
    # Two items for two samples, of two numbers each by chance.
    assert joined([[zeros(2), ones(2)], [ones(1)]], [2, 1]) == [[0.0, 0.0], [1.0, 1.0], [1.0]]
    # As many outputs as samples in every batch, but never the same number: items.
    assert joined([[zeros(2), ones(2)], [zeros(1)]], [2, 1]) == [[0.0, 0.0], [1.0, 1.0], [0.0]]
    assert joined([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]


def test_kinds_are_unified() -> None:
    half, single, wide = Rows(torch.float16, ()), Rows(torch.float32, ()), Rows(torch.float32, (3,))
    assert unify([half, single], "outputs") == single
    assert unify([single, wide], "outputs") == Items()
    assert unify([wide, Items()], "outputs") == Items()
    spec = describe({"a": torch.zeros(2), "b": (torch.zeros(2, 3), None)}, 2, "outputs")
    assert isinstance(spec, Branch)
    assert str(spec) == "dict(a: float32[rows], b: tuple(0: float32[rows, 3], 1: None))"


def test_the_size_of_a_batch() -> None:
    x = torch.zeros(4, 3)
    assert size_of([x, torch.zeros(4)]) == 4
    assert size_of([torch.zeros(3), torch.zeros(3)], expected=2) == 2  # a list of samples, as a collate_fn may make
    assert size_of({"images": x, "names": ["a"] * 4}) == 4
    assert size_of({"names": ["a"] * 4}) == 4
    assert size_of(["a", "b"]) == 2
    assert size_of("abc") is None
    assert size_of([x[:3]], expected=4) == 3  # samples that a collate_fn left out
    assert rows_of((torch.tensor(1.0), {"a": x}), 2) == 4
    assert rows_of(["a", "b"], 2) == 2
