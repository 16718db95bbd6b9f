"""``stacks/rank-N.txt``: what a rank itself knew, and what its interpreter says without its help."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from instep.guard import storage
from instep.guard.processes import catches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from instep.guard.records import Frame, View

_STACKS_S = 0.4  # what the ranks have to write their stacks


def collect(folder: Path, pids: Mapping[int, int], views: Iterable[View]) -> dict[int, str]:
    """Have the ranks of this machine write the stacks of all their threads; "" where one cannot.

    Args:
        folder: where they write.
        pids: their processes.
        views: of all ranks.

    """
    asked = [view.rank for view in views if view.process.alive and view.rank in pids]
    asked = [rank for rank in asked if catches(pids[rank], storage.STACKS_SIGNAL)]
    for rank in asked:
        storage.clear_stacks(folder, rank)
        with suppress(OSError):
            os.kill(pids[rank], storage.STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline and not all(storage.read_stacks(folder, rank) for rank in asked):
        time.sleep(0.01)
    time.sleep(0.02 if asked else 0)  # the last lines
    return {rank: storage.read_stacks(folder, rank).rstrip() for rank in pids}


def write(folder: Path, views: Iterable[View], texts: Mapping[int, str]) -> None:
    """Write a file for each rank.

    Args:
        folder: made if it is missing.
        views: of all ranks.
        texts: from :func:`collect`.

    Raises:
        OSError: it cannot be written.

    """
    folder.mkdir(exist_ok=True)
    for view in views:
        lines = _view_lines(view)
        if text := texts.get(view.rank):
            lines += ["", "all threads, innermost frame first:", text]
        (folder / f"rank-{view.rank}.txt").write_text("\n".join(lines) + "\n", errors="replace")


def _view_lines(view: View) -> list[str]:
    process = view.process
    if process.alive:
        state = f"state {process.state or '?'}, {process.busy:.0%} of a core"
        state += f", sleeps in {process.waits_in}" if process.waits_in else ""
    else:
        state = f"ended, exit code {process.exit_code}" if process.exit_code is not None else "ended"
    lines = [f"rank {view.rank} on {view.host}: {state}"]
    snapshot = view.snapshot
    if snapshot is not None:
        last = snapshot.last_raised
        if last is None:
            lines += ["", f"main thread, {view.age_s:.1f} s before the verdict, innermost frame first:"]
            lines += _frame_lines(snapshot.stack)
        for raised in [last] if last else snapshot.handled:
            lines += ["", f"exception {raised.kind}: {raised.text}", *_frame_lines(raised.frames)]
        if snapshot.ops:
            lines += ["", "last operations:"]
        for op in snapshot.ops[-20:]:
            site = op.user_site()
            shapes = " ".join(str(list(size)) for size in op.sizes)
            where = f"  {site.file}:{site.line}" if site else ""
            lines.append(f"  group {op.group} #{op.index} {op.kind} {shapes} {'done' if op.done else 'waits'}{where}")
    elif view.beat is not None:
        lines += ["", f"main thread, {view.silent_s:.1f} s before the verdict, innermost frame first:"]
        lines += _frame_lines(view.beat.stack)
    if process.last_words:
        lines += ["", "its last words:", *process.last_words.splitlines()[-60:]]
    return lines


def _frame_lines(frames: Iterable[Frame]) -> list[str]:
    lines = []
    for frame in frames:
        lines.append(f"  {frame.file}:{frame.line} in {frame.function}")
        lines += [f"      {name} = {value}" for name, value in frame.values.items()]
    return lines
