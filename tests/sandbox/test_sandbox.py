"""The practice cluster, for real: machines that answer, a network that is cut, and nothing left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.machines import Sandbox


def test_machines_answer(sandbox: Sandbox) -> None:
    out = sandbox.exec("n1", ["srun", "-N3", "hostname"]).ok().out
    assert sorted(out.split()) == ["n1", "n2", "n3"]
