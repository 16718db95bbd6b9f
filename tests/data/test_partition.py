"""The arithmetic of the partition, for any numbers."""

from __future__ import annotations

from itertools import count, islice

from hypothesis import given, strategies as st

from instep.data.partition import Partition
from tests.data.cases import flat

PARTITIONS = st.integers(1, 9).flatmap(lambda n: st.builds(Partition, st.just(n), st.integers(n, 60), st.booleans()))


@given(PARTITIONS, st.integers(0, 200))
def test_each_unit_goes_to_one_rank(part: Partition, units: int) -> None:
    taken = [[i for _, mine in part.share(iter(range(units)), rank) for i in mine] for rank in range(part.world_size)]

    assert sorted(flat(taken)) == list(range(part.kept(units)))
    assert [len(mine) for mine in taken] == [part.count(units, rank) for rank in range(part.world_size)]
    assert part.kept(units) == (units - units % part.block if part.drop_last else units)


@given(PARTITIONS, st.integers(0, 200))
def test_a_step_is_a_slice_of_the_order(part: Partition, units: int) -> None:
    batches = [list(part.share(iter(range(units)), rank)) for rank in range(part.world_size)]

    for step in range(part.steps(units)):
        at = step * part.block
        shares = [share for mine in batches for position, share in mine if position == at]
        assert sorted(flat(shares)) == list(range(at, min(at + part.block, part.kept(units))))
        assert len(flat(shares)) == part.size(units, at)
    assert [len(mine) for mine in batches] == [part.batches(units, rank) for rank in range(part.world_size)]
    assert part.steps(units) == max(map(len, batches))
    assert part.idle_ranks(units) == sum(len(mine) < part.steps(units) for mine in batches)


@given(st.integers(7, 40), st.integers(1, 7), st.integers(0, 100), st.booleans())
def test_the_union_depends_on_the_global_batch_alone(block: int, world_size: int, units: int, drop_last: bool) -> None:
    part, alone = Partition(world_size, block, drop_last), Partition(1, block, drop_last)

    shares = [share for rank in range(world_size) for share in part.share(iter(range(units)), rank)]
    for step, whole in alone.share(iter(range(units)), 0):
        assert sorted(i for k, mine in shares if k == step for i in mine) == whole


def test_an_endless_order_is_read_lazily() -> None:
    part = Partition(3, 6)

    assert list(islice(part.share(count(), 1), 2)) == [(0, [1, 4]), (6, [7, 10])]


@given(PARTITIONS, st.integers(0, 100), st.integers(0, 120))
def test_from_a_position_on_the_rest_is_cut_anew(part: Partition, units: int, start: int) -> None:
    rest = range(units)[start:]
    shares = [list(part.share(iter(range(units)), rank, start)) for rank in range(part.world_size)]

    position = start
    while size := part.size(units, position):
        assert [share for mine in shares for at, share in mine if at == position] == [
            list(rest[position - start :][rank : size : part.world_size])
            for rank in range(part.world_size)
            if part.part(rank, size)
        ]
        position += size
    assert sum(len(share) for mine in shares for _, share in mine) == part.kept(len(rest)) == position - start
