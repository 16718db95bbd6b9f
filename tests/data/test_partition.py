"""The arithmetic of the partition, for any numbers."""

from __future__ import annotations

from itertools import count, islice

from hypothesis import given, strategies as st

from instep.data.partition import Partition
from tests.data.cases import flat

PARTITIONS = st.builds(Partition, st.integers(1, 9), st.integers(1, 7), st.booleans())


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
        union = sorted(i for mine in batches for k, share in mine if k == step for i in share)
        assert union == list(range(step * part.block, min((step + 1) * part.block, part.kept(units))))
        assert len(union) == part.size(units, step)
    assert [len(mine) for mine in batches] == [part.batches(units, rank) for rank in range(part.world_size)]
    assert part.steps(units) == max(map(len, batches))
    assert part.idle_ranks(units) == sum(len(mine) < part.steps(units) for mine in batches)


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 100), st.booleans())
def test_the_union_depends_on_the_global_batch_alone(rest: int, world_size: int, units: int, drop_last: bool) -> None:
    block = 12 * rest
    part, alone = Partition(world_size, block // world_size, drop_last), Partition(1, block, drop_last)

    shares = [share for rank in range(world_size) for share in part.share(iter(range(units)), rank)]
    for step, whole in alone.share(iter(range(units)), 0):
        assert sorted(i for k, mine in shares if k == step for i in mine) == whole


def test_an_endless_order_is_read_lazily() -> None:
    part = Partition(3, 2)

    assert list(islice(part.share(count(), 1), 2)) == [(0, [1, 4]), (1, [7, 10])]
