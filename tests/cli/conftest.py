"""Folders to run in, and machines with ssh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.cli.machines import Machines
from tests.launch.jobs import Place
from tests.real.hosts import hosts
from tests.real.sshd import sshd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder for runs of scripts that need no torch."""
    return Place(tmp_path, torch=False)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A head and two machines with sshd, all with the same files."""
    needs.need_namespaces()
    needs.need_tool("sshd")
    folder = tmp_path_factory.mktemp("ssh")
    with hosts(["head", "n1", "n2"]) as (head, *nodes), sshd(nodes, folder) as config:
        inventory = folder / "inventory.toml"
        inventory.write_text(f'ssh_config = "{config}"\n[[machines]]\nname = "n1"\n[[machines]]\nname = "n2"\n')
        yield Machines(head, tuple(nodes), inventory)
