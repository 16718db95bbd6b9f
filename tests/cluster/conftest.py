"""One sandbox for all tests of this folder that want real machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.cluster import machines

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def _sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[machines.Sandbox]:
    needs.need_sandbox()
    share = tmp_path_factory.mktemp("share")
    for folder in share.parents:  # pytest closes its folders to others; the machines' users must pass through
        if folder.owner() == "root" and folder.name.startswith("pytest"):
            folder.chmod(0o755)
    with machines.sandbox(share) as made:
        yield made


@pytest.fixture
def sandbox(_sandbox: machines.Sandbox) -> Iterator[machines.Sandbox]:
    """Machines n1, n2 and n3, with Slurm: all are on and none is cut off at the start of each test."""
    yield _sandbox
    _sandbox.restore()
