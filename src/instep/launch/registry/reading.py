"""Read the logs of a run, while ranks may be writing them."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.registry.known import slurm_states
from instep.runs import Outcome, launcher
from instep.runs.finding import read_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_CHUNK = 1 << 16
_PAUSE_S = 0.1
_STATE_S = 0.5  # between two looks at run.json
_SLURM_S = 10.0  # between two questions to Slurm, which many may ask


class Reader:
    """One log, from where it was left.

    Args:
        path: of the log; it may come later.
        rank: whose it is.
        prefixed: whether each line is to begin with the rank; then only whole lines are given.

    """

    def __init__(self, path: Path, rank: int, *, prefixed: bool) -> None:
        self.path = path
        self._prefix = f"[rank {rank}] ".encode() if prefixed else b""
        self._file = -1
        self._at = 0
        self._rest = b""

    @property
    def is_there(self) -> bool:
        """Whether there is a log, so that its end is the end of what was written."""
        return self._file >= 0

    def open(self) -> None:
        """Open it, if it is there.

        Raises:
            RunError: it is there, and may not be read.

        """
        with suppress(FileNotFoundError):
            try:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except PermissionError as error:
                raise _cannot_read(self.path, error) from error

    def skip_to_last(self, lines: int) -> None:
        """Go on from the last lines."""
        if self._file < 0:
            return
        size = at = os.fstat(self._file).st_size
        found = b""
        while at > 0 and found.count(b"\n") <= lines:
            before, at = at, max(0, at - _CHUNK)
            found = os.pread(self._file, before - at, at) + found
        parts = found.split(b"\n")
        keep = lines + 1 if parts[-1] == b"" else lines
        self._at = size - (len(b"\n".join(parts[-keep:])) if lines else 0)

    def read(self) -> bytes:
        """What is new; b"" for nothing.

        Raises:
            RunError: it cannot be read.

        """
        if self._file < 0:
            self.open()
            if self._file < 0:
                return b""
        if os.fstat(self._file).st_size < self._at:  # somebody has emptied it
            self._at = 0
        try:
            data = os.pread(self._file, _CHUNK, self._at)
        except OSError as error:
            raise _cannot_read(self.path, error) from error
        self._at += len(data)
        return self._shown(data) if self._prefix else data

    def rest(self) -> bytes:
        """A last line that has no end."""
        rest, self._rest = self._rest, b""
        return self._prefix + _settled(rest) + b"\n" if rest else b""

    def _shown(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _CHUNK:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + _settled(line) + b"\n" for line in lines)


def _cannot_read(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read", evidence=[str(error.strerror)])


def _settled(line: bytes) -> bytes:
    """Of a line that was drawn over (a progress bar) what a terminal shows in the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def print_logs(folder: Path, readers: Sequence[Reader], *, tail: int | None, follow: bool) -> int:
    """Print what there is, and with `follow` what comes until the run has ended.

    Args:
        folder: of the run.
        readers: one for each rank that is to be shown.
        tail: only so many of the last lines there are; None for all.
        follow: whether to go on.

    Returns:
        the exit code: 1 where a run that was followed will never have an end.

    Raises:
        RunError: a log may not be read.
        BrokenPipeError: nobody reads any more.

    """
    for reader in readers:
        reader.open()
        if tail is not None:
            reader.skip_to_last(tail)
    goes_on = GoesOn(folder)
    while follow:
        ended = not goes_on.look()  # before reading: what was written until then is read after
        _pass_on(readers)
        if ended:
            break
        _pause(_PAUSE_S)
    _pass_on(readers)
    _write(b"".join(reader.rest() for reader in readers))
    if not any(reader.is_there for reader in readers):
        print("… nothing was written yet: there is no log", file=sys.stderr, flush=True)
    if follow:
        print(f"… {goes_on.end}", file=sys.stderr, flush=True)
    return 1 if follow and goes_on.is_lost else 0


def _pass_on(readers: Sequence[Reader]) -> None:
    """All that is there: of each rank what it wrote, in pieces, so that one that writes on keeps nobody waiting."""
    left = list(readers)
    while left:
        for reader in list(left):
            data = reader.read()
            if data:
                _write(data)
            else:
                left.remove(reader)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            select.select([], [1], [])


def _pause(seconds: float) -> None:
    """Wait, but not when nobody reads any more.

    Raises:
        BrokenPipeError: nobody does.

    """
    waiting = select.poll()
    waiting.register(1, 0)
    if any(what & select.POLLERR for _, what in waiting.poll(seconds * 1000)):
        raise BrokenPipeError


class GoesOn:
    """Whether the run does.

    Attributes:
        end: how it ended, in words.
        is_lost: its launcher has gone without writing an end.

    """

    def __init__(self, folder: Path) -> None:
        self.end = ""
        self.is_lost = False
        self._folder = folder
        self._next_at = self._slurm_at = 0.0
        self._slurm: bool | None = None

    def look(self) -> bool:
        """Whether there is more to come."""
        now = time.monotonic()
        if now < self._next_at:
            return True
        self._next_at = now + _STATE_S
        try:
            record = read_record(self._folder)
        except RunError as error:
            self.end, self.is_lost = error.what, True
            return False
        outcome, slurm_job = str(record["outcome"]), record.get("slurm_job")
        if outcome == Outcome.RUNNING.value:
            # On another machine nobody can see whether the launcher lives.
            elsewhere = not slurm_job and not launcher.is_here(record)
            return launcher.is_alive(record) or self._is_queued(slurm_job, now) or elsewhere or not self._lose(record)
        if outcome == Outcome.PREEMPTED.value and self._is_queued(slurm_job, now):
            return True  # it will be started again, in the same folder
        code = record.get("exit_code")
        self.end = f"{record['name']}: {outcome}" + (f" (exit code {code})" if code else "")
        return False

    def _lose(self, record: Mapping[str, Any]) -> bool:
        """Nobody is there who would write the end; False where it was written since we looked."""
        with suppress(RunError):
            if read_record(self._folder)["outcome"] != Outcome.RUNNING.value:
                return False
        job = record.get("slurm_job")
        gone = f"Slurm job {job} has gone" if job else "its launcher has gone"
        self.end, self.is_lost = f"{record['name']}: {gone}, and nobody wrote an end", True
        return True

    def _is_queued(self, job: object, now: float) -> bool:
        """Whether Slurm has the job, or cannot be asked."""
        if not job:
            return False
        if self._slurm is None or now >= self._slurm_at:
            self._slurm_at = now + _SLURM_S
            states = slurm_states()
            self._slurm = states is None or str(job) in states
        return self._slurm
