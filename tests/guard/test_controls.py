"""The guard on programs that are in step, however it looks: it ends none of them, and says nothing against them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.guard import controls

if TYPE_CHECKING:
    from collections.abc import Iterator

SUSPECT = ("--guard-suspect", "3")  # and not eight seconds, with which `make guard-table` runs them
SOME = {  # and what their programs are told: to be slow for twice as long, and more
    "slow_rank": ("2", "6"),  # steps of so many seconds
    "debugger": (),
    "main_alone": ("7",),
    "first_step_compiles": ("3.5",),
    "main_downloads": ("15",),
    "main_sleeps": ("7",),
    "uneven_but_legal": (),
    "raises": (),
}


@pytest.fixture(scope="module")
def ends() -> Iterator[dict[str, Future[controls.Ended]]]:
    """Of the controls to come: a few run at a time, since most of their time is waiting."""
    every = {control.name: control for control in controls.find()}
    with ThreadPoolExecutor(5) as pool:
        yield {name: pool.submit(controls.run, every[name], *words, options=SUSPECT) for name, words in SOME.items()}


@pytest.mark.parametrize("name", SOME)
def test_ends_by_itself(name: str, ends: dict[str, Future[controls.Ended]]) -> None:
    ended = ends[name].result()
    assert ended.well, f"{ended.desync}\n{ended.text}"
