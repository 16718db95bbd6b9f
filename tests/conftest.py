"""What every test can rely on."""

from __future__ import annotations

import signal

import pytest

from tests import faults, harness


def pytest_configure() -> None:
    """Signals do what they do for a user at a terminal, also under nohup or a shell's ``&``, which ignore some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of faults, where any was tried."""
    if found := faults.lines():
        terminalreporter.section("faults")
        for line in found:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the launcher that may have started pytest itself."""
    for name in harness.launcher_variables():
        monkeypatch.delenv(name)
