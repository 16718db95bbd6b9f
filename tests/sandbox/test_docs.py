"""What docs/sandbox.md shows is what comes back, line by line."""

from __future__ import annotations

import re
import sys
import time
import uuid
from pathlib import Path

from tests import needs
from tests.commands import run_command
from tests.sandbox.traces import traces
from tests.transcripts import differs, read

PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"
BIN = Path(sys.executable).parent


def test_the_page(tmp_path: Path) -> None:
    needs.need_sandbox()
    name = f"d-{uuid.uuid4().hex[:6]}"  # the page uses the name that all users have by default
    typed = read(PAGE)
    assert len(typed) > 8
    try:
        for one in typed:
            command = re.sub(r"^(?:sudo )?(instep sandbox \w+)", rf"\1 --name {name}", one.command)
            if " up " in command:
                # On another host than Debian 12 the default is another release.
                command += " --release bookworm"
            done = run_command(["sh", "-c", f"exec 2>&1; PATH={BIN}:$PATH; {command}"], limit_s=600, cwd=tmp_path).ok()
            said = done.out.replace(f" --name {name}", "").replace(name, "sandbox")
            said = re.sub(r"10\.77\.\d+\.", "10.77.0.", said)
            if " up " in command:
                said = said[said.index("starting ") :]  # an image may have been made first
                await_slurm(name)
            wrong = differs(one.shown, said)
            assert not wrong, f"{PAGE.name}, line {one.line}: {one.command}\n{wrong}"
    finally:
        if traces(name):
            run_command([BIN / "instep", "sandbox", "down", "--name", name])
    assert "sandbox down" in typed[-1].command


def await_slurm(name: str) -> None:
    deadline = time.monotonic() + 30
    while run_command([BIN / "instep", "sandbox", "exec", "--name", name, "n1", "srun", "-N3", "true"]).rc:
        assert time.monotonic() < deadline, "Slurm does not answer"
        time.sleep(0.2)
