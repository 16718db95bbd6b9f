"""Machines to look at from a head, over ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.commands import Result
    from tests.real.hosts import Host

INSTEP = str(Path(sys.executable).with_name("instep"))


@dataclass(frozen=True)
class Machines:
    """A head, and machines that it reaches by ssh."""

    head: Host
    nodes: tuple[Host, ...]
    inventory: Path

    def instep(self, verb: str, *words: object, cwd: Path, limit_s: float = 40) -> Result:
        """``instep VERB --inventory ... WORDS`` on the head."""
        argv = [INSTEP, verb, "--inventory", str(self.inventory), *map(str, words)]
        return self.head.run(argv, cwd=cwd, limit_s=limit_s)

    @contextmanager
    def process(
        self, number: int, job: str, *words: str, folder: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process on a machine that carries a run's variables."""
        variables = [f"INSTEP_JOB={job}", *([f"INSTEP_RUN={folder}"] if folder else [])]
        words = words or ("sleep", "60")
        # nsenter stands between: what it has started shall not outlive it.
        argv = self.nodes[number].argv(["setpriv", "--pdeathsig", "KILL", "env", *variables, *words])
        started = subprocess.Popen(argv)
        try:
            yield started
        finally:
            started.kill()
            started.wait()

    @contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """Without its network."""
        self._link(number, "down")
        try:
            yield
        finally:
            self._link(number, "up")

    def _link(self, number: int, state: str) -> None:
        self.nodes[number].run(["ip", "link", "set", "eth0", state]).ok()


def write_record(folder: Path, **values: Any) -> Path:
    """A ``run.json`` as the launcher of a run writes it; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").mkdir(exist_ok=True)
    record = {
        "name": folder.name, "job": f"{folder.name}-1234", "hosts": ["n1", "n2"], "world_size": 4, "via": "ssh",
        "pid": 999999, "launcher": {"host": "head", "machine": "gone", "since": 1}, "slurm_job": None,
        "start": "2026-01-31T12:00:00.000+01:00", "end": None, "seconds": None, "outcome": "running",
        "exit_code": None, "ssh_config": None,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**record, **values}))
    return folder
