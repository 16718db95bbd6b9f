"""The guard on programs that are in step, however it looks: it ends none of them, and says nothing against them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.guard import controls

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = (
    "main_alone",
    "first_step_compiles",
    "slow_rank",
    "debugger",
    "main_sleeps",
    "uneven_but_legal",
    "raises",
)


@pytest.fixture(scope="module")
def ends() -> Iterator[dict[str, Future[controls.Ended]]]:
    """Of the controls to come: a few run at a time, since most of their time is waiting."""
    every = {control.name: control for control in controls.find()}
    with ThreadPoolExecutor(4) as pool:
        yield {name: pool.submit(controls.run, every[name]) for name in SOME}


@pytest.mark.parametrize("name", SOME)
def test_ends_by_itself(name: str, ends: dict[str, Future[controls.Ended]]) -> None:
    ended = ends[name].result()
    assert ended.well, f"{ended.desync}\n{ended.text}"
