"""What every test can rely on."""

from __future__ import annotations

import pytest

from tests import harness


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the launcher that may have started pytest itself."""
    for name in harness.launcher_variables():
        monkeypatch.delenv(name)
