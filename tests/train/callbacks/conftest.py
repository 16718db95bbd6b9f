"""A trainer that a test runs in this process joins a world of one: no test leaves it to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import instep

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    instep.close()
