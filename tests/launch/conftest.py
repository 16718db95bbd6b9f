"""Folders to run in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.launch.jobs import Place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for runs of scripts that need no torch."""
    return Place(tmp_path, torch=False)


@pytest.fixture
def torch_place(tmp_path: Path) -> Place:
    """A folder for runs of scripts that need it."""
    return Place(tmp_path, torch=True)
