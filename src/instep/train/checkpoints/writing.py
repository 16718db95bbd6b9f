"""One save, from tensors to a checkpoint that stands. It runs on all ranks, in a thread of its own or not.

What makes every moment safe:

1. All files are written into ``.step-N.partial-OWNER``, which no reader takes for a checkpoint, and are on the disk.
2. The manifest is the last of them: it lists the others with their sizes and checksums.
3. One rename, which a file system does wholly or not at all, makes it ``step-N``. This is the commit. A marker written
   after the rename would leave a moment in which ``step-N`` is there and is none.
4. Only then the pointer to the best is moved, and what nobody wants any more is deleted: first renamed, so that
   ``step-N`` never stands half-deleted.

On a file system whose rename is no single act (some object stores), the manifest still says what has to be there.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from instep.train.checkpoints import files, holding, listing, manifest, names, retention

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from instep.train.checkpoints.files import Written
    from instep.train.checkpoints.peers import Peers

PLAIN = "plain.pt"
_READERS_END_WITHIN = 10.0  # seconds, before a checkpoint that is being read is replaced all the same
_SHOWN = 5


@dataclass
class Save:
    """What is to be saved on this rank.

    Attributes:
        step: optimizer updates done.
        name: of the partial folder, the same on all ranks.
        tensors: what this rank writes of them, by key path.
        plain: the file of plain values, on the main rank.
        own: the file of this rank's own state.
        given: for the manifest.
        best: mark it as the best.
        problem: why this rank cannot take part; the save fails on all.

    """

    step: int
    name: str
    tensors: dict[str, Tensor]
    plain: bytes
    own: bytes
    given: dict[str, Any]
    best: bool
    problem: str = ""


@dataclass
class Outcome:
    """How a save ended, the same on all ranks.

    Attributes:
        committed: the name of the checkpoint, if it stands.
        problems: why it does not: one line for each rank that has something to say.
        notes: what else went wrong; the checkpoint stands.

    """

    committed: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def own_name(rank: int) -> str:
    """The file of a rank's own state."""
    return f"rank-{rank}.pt"


def carry_out(save: Save, path: Path, peers: Peers, *, keep: int, visible_within_s: float) -> Outcome:
    """Write the files of this rank; on the main rank, commit. A failure on any rank is one on all, and leaves nothing.

    Args:
        save: what to write.
        path: the folder of the checkpoints.
        peers: all ranks.
        keep: how many checkpoints to keep, the best besides.
        visible_within_s: how long the main rank waits to see the files of the others.

    """
    partial = path / save.name
    written: dict[str, Written] = {}
    counted = files.Checksummed()
    problem = save.problem
    if not problem:
        try:
            written |= _write_own(partial, save, peers)
        except OSError as error:
            problem = _reason(error)
    try:
        # Entered by every rank, also by one with a problem: the others would wait for it.
        _write_tensors(partial, {} if problem else save.tensors, peers, counted)
        written |= counted.written
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # whatever it was; DCP tells all ranks of it
        problem = problem or _reason(counted.failure or _part_in(error, peers.rank))
    reports = peers.gather((socket.gethostname(), problem, written))
    outcome = Outcome(problems=_problems(reports))
    if peers.is_main:
        if not outcome.problems:
            try:
                outcome = _finish(save, path, reports, keep, visible_within_s)
            except Exception as error:  # noqa: BLE001  # the others wait to hear how it ended, whatever happened here
                outcome = Outcome(problems=[f"the main rank: {_reason(error)}"])
        if outcome.problems:
            shutil.rmtree(partial, ignore_errors=True)
    return peers.from_main(outcome)


def _write_own(partial: Path, save: Save, peers: Peers) -> dict[str, Written]:
    partial.mkdir(parents=True, exist_ok=True)
    written = {own_name(peers.rank): files.write_new(partial / own_name(peers.rank), save.own)}
    if peers.is_main:
        written[PLAIN] = files.write_new(partial / PLAIN, save.plain)
    return written


def _write_tensors(partial: Path, tensors: dict[str, Tensor], peers: Peers, counted: files.Checksummed) -> None:
    import torch.distributed.checkpoint as dcp

    hush_dcp()
    writer = dcp.FileSystemWriter(partial)
    writer.fs = counted
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=peers.group)


def hush_dcp() -> None:
    """Do not let torch.distributed.checkpoint wonder why a single process saves alone.

    A filter for good: ``warnings.catch_warnings`` is not for programs with threads.
    """
    message = "torch.distributed is (disabled, )?unavailable or uninitialized"
    if not any(one[1] is not None and one[1].pattern == message for one in warnings.filters):
        warnings.filterwarnings("ignore", message=message)


def _problems(reports: list[tuple[str, str, dict[str, Written]]]) -> list[str]:
    found = [f"rank {rank} on {host}: {problem}" for rank, (host, problem, _) in enumerate(reports) if problem]
    return found[:_SHOWN] + ([f"... and {len(found) - _SHOWN} more ranks"] if len(found) > _SHOWN else [])


def _finish(
    save: Save, path: Path, reports: list[tuple[str, str, dict[str, Written]]], keep: int, visible_within_s: float
) -> Outcome:
    """On the main rank: verify that all is there, commit, tidy up."""
    host = socket.gethostname()
    try:
        if unseen := _wait_for_files(path / save.name, reports, visible_within_s):
            return Outcome(problems=[f"the main rank on {host} does not see in {path}: {', '.join(unseen[:_SHOWN])}"])
        outcome = Outcome(names.name_of(save.step))
        written = {name: file for _, _, some in reports for name, file in some.items()}
        outcome.notes += _commit(save, path, written, len(reports))
    except OSError as error:
        return Outcome(problems=[f"the main rank on {host}: {_reason(error)}"])
    try:
        if save.best:
            files.replace(path / listing.BEST, (json.dumps({"step": save.step}) + "\n").encode())
        retention.tidy(path, keep, save.step)
    except OSError as error:
        outcome.notes.append(f"after saving {outcome.committed}: {_reason(error)}")
    return outcome


def _wait_for_files(partial: Path, reports: list[tuple[str, str, dict[str, Written]]], within_s: float) -> list[str]:
    """The files that ranks wrote and this one does not see in their size: late on a network, or on another disk."""
    all_of_them = {name: file for _, _, some in reports for name, file in some.items()}

    def unseen() -> list[str]:
        return manifest.wrong_sizes(partial, {"files": {n: {"bytes": f.size} for n, f in all_of_them.items()}})

    return wait_until_empty(unseen, within_s)


def wait_until_empty(complaints: Callable[[], list[str]], within_s: float) -> list[str]:
    """Ask for complaints again and again until there are none, or the time is up; the last ones."""
    end, pause = time.monotonic() + within_s, 0.01
    while found := complaints():
        rest = end - time.monotonic()
        if rest <= 0:
            break
        time.sleep(min(pause, rest))
        pause = min(2 * pause, 0.5)
    return found


def _commit(save: Save, path: Path, written: dict[str, Written], world_size: int) -> list[str]:
    """Make the checkpoint stand; what else there is to say."""
    partial, target = path / save.name, path / names.name_of(save.step)
    serial = 1 + max((one.serial for one in listing.look(path).whole), default=0)
    text = manifest.make(save.given, step=save.step, world_size=world_size, serial=serial, files=written)
    manifest.write(partial, text)
    files.sync_folder(partial)
    replaced = _make_room(target, save.step)
    try:
        partial.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)
        raise
    files.sync_folder(path)
    if replaced is None:
        return []
    if names.read_aside(replaced.name) is None:
        return [f"{target} was there and is no checkpoint of instep's; it is {replaced.name} now"]
    shutil.rmtree(replaced, ignore_errors=True)
    return []


def _make_room(target: Path, step: int) -> Path | None:
    """Where the former checkpoint of the step is now. A killed process may leave it there: it still counts."""
    if not target.exists():
        return None
    try:
        manifest.read(target)
    except manifest.Unfit:  # not ours, or broken: nobody's to delete
        replaced = next(
            one for n in range(1_000_000) if not (one := target.with_name(f"{target.name}.old-{n}")).exists()
        )
        target.rename(replaced)
        return replaced
    hold = None
    with suppress(OSError):
        hold = holding.take_alone(target, _READERS_END_WITHIN)
    try:
        replaced = target.with_name(names.aside(step, "replaced"))
        target.rename(replaced)
    finally:
        if hold is not None:
            hold.release()
    return replaced


def _part_in(error: BaseException, rank: int) -> BaseException | None:
    """What went wrong on this rank, of a failure that torch.distributed.checkpoint has told to all."""
    failures = getattr(error, "failures", None)
    if failures is None:
        return error
    return failures[rank][0] if rank in failures else None


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
