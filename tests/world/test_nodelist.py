"""Slurm's shorthand; tests/real compares with scontrol."""

from __future__ import annotations

import pytest

from instep.errors import WorldError
from instep.world.nodelist import expand, tasks_per_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a[01-03,07],b5-ib", ["a01", "a02", "a03", "a07", "b5-ib"]),
        ("rack[0-1]node[1-2]", ["rack0node1", "rack0node2", "rack1node1", "rack1node2"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("b5,a[1-2]", ["b5", "a1", "a2"]),
        ("x[9-11]", ["x9", "x10", "x11"]),
        ("x[09-11]", ["x09", "x10", "x11"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n1,n[2-3],", ["n1", "n2", "n3"]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "n[1-2", "n]1[", "n[]", "n[a]", "n[3-1]", "n[-2]", "n[1-2]]", "n[1-99999999]"]
)
def test_no_list(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2]), ("1(x1)", [1]), ("3,1(x2)", [3, 1, 1])]
)
def test_tasks(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(x3", "-1", "2(x99999999)"])
def test_no_tasks(text: str) -> None:
    with pytest.raises(WorldError):
        tasks_per_node(text)
