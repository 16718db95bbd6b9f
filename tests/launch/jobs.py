"""Start ``instep run`` in a folder of its own, look at what it does, and see that nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.commands import MARKER, Result, marked, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTEP = str(Path(sys.executable).with_name("instep"))


class Place:
    """A working folder for runs."""

    def __init__(self, path: Path, *, torch: bool) -> None:
        self.path = path
        self.env: dict[str, str] = {"OMP_NUM_THREADS": "1"}
        if not torch:  # as on a machine without it; and a start takes 0.2 s instead of 2
            hidden = path / "no-torch"
            (hidden / "torch").mkdir(parents=True)
            (hidden / "torch" / "__init__.py").write_text("raise ImportError('hidden')\n")
            self.env["PYTHONPATH"] = str(hidden)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def run(self, *words: object, limit_s: float = 40, stdin: str = "", env: dict[str, str] | None = None) -> Result:
        """``instep run`` with these words, to its end; fails if a process is left."""
        argv = [INSTEP, "run", *map(str, words)]
        return run_command(argv, limit_s=limit_s, cwd=self.path, stdin=stdin, env=self.env | (env or {}))

    @contextmanager
    def started(self, *words: object, limit_s: float = 40) -> Iterator[Running]:
        """``instep run`` with these words, while it runs; at the end no process may be left."""
        job = uuid.uuid4().hex
        with (self.path / "out.txt").open("wb") as out, (self.path / "err.txt").open("wb") as err:
            process = subprocess.Popen(
                [INSTEP, "run", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.path,
                env={**os.environ, **self.env, MARKER: job},
                start_new_session=True,
            )
        running = Running(self, process, job, time.monotonic() + limit_s)
        try:
            yield running
        finally:
            process.kill()
            process.wait()
            left = marked(job, wait_s=3)
            for entry in psutil.process_iter(["environ"]):
                if (entry.info["environ"] or {}).get(MARKER) == job:
                    entry.kill()
        assert not left, left

    @property
    def runs(self) -> list[Path]:
        return sorted((self.path / "runs").glob("*")) if (self.path / "runs").exists() else []

    def record(self) -> dict[str, Any]:
        (folder,) = self.runs
        found: dict[str, Any] = json.loads((folder / "run.json").read_text())
        return found

    def log(self, rank: int) -> str:
        (folder,) = self.runs
        return (folder / "log" / f"rank-{rank}.txt").read_text()


class Running:
    """A run that goes on."""

    def __init__(self, place: Place, process: subprocess.Popen[bytes], job: str, deadline: float) -> None:
        self.place = place
        self.process = process
        self.job = job
        self._deadline = deadline

    def wait_for(self, *names: str) -> None:
        """Until these files are there: ranks make them to say where they are."""
        while not all((self.place.path / name).exists() for name in names):
            assert time.monotonic() < self._deadline, f"no {names}: {self.err}"
            assert self.process.poll() is None, self.err
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there: {self.err}; {marked(self.job)}") from None

    @property
    def server(self) -> psutil.Process:
        (server,) = psutil.Process(self.process.pid).children()
        return server

    @property
    def out(self) -> str:
        return (self.place.path / "out.txt").read_text()

    @property
    def err(self) -> str:
        return (self.place.path / "err.txt").read_text()
