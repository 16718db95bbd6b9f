"""The real launchers, and one Slurm for all tests that need it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.real import slurm

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is marked: ``pytest -m 'not real'`` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torchrun`` and ``instep`` are those beside this Python, and there is a shell, as in every login.

    ``salloc`` starts ``$SHELL`` in its interactive step; continuous integration may have none.
    """
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SHELL", "/bin/sh")


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Two compute nodes, n1 and n2, and a head."""
    needs.need_namespaces()
    needs.need_tool(*slurm.TOOLS)
    with slurm.cluster() as made:
        yield made
