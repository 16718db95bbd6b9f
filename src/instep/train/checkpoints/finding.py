"""Which checkpoint? The main rank decides, and every rank sees for itself that it has that very one before its eyes."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.comm.logs import get_logger
from instep.comm.objects import gather_objects
from instep.errors import CheckpointError
from instep.train.checkpoints import holding, listing, manifest, names
from instep.train.checkpoints.peers import main_decides
from instep.train.checkpoints.writing import wait_until_empty

if TYPE_CHECKING:
    from instep.comm.session import Session
    from instep.train.checkpoints.listing import Found

_SHOWN = 5
_VANISHED_AT_MOST = 100  # checkpoints, each deleted in the moment between seeing it and holding it


@dataclass(frozen=True)
class _Choice:
    """The main rank's: a checkpoint, by its name in the folder or, where it lies elsewhere, by its path."""

    where: str
    manifest: dict[str, Any]


class Search:
    """A search for one checkpoint, on all ranks together.

    Args:
        path: the folder of the checkpoints.
        session: the world.
        visible_within_s: how long a rank waits to see what the main rank sees.

    """

    def __init__(self, path: Path, session: Session, visible_within_s: float) -> None:
        self._path, self._session, self._within_s = path, session, visible_within_s
        self._refused: set[tuple[str, Any]] = set()
        self._told: set[str] = set()
        self._hold: holding.Hold | None = None

    def run(self, which: str | int | Path) -> tuple[Found, holding.Hold] | None:
        """The checkpoint, and the hold on it that keeps it from being deleted; None if there is none.

        Raises:
            CheckpointError: one that was named is not there, or a rank does not see what the main rank sees.

        """
        newest = which == "latest"
        try:
            while True:
                choice = main_decides(self._session, lambda: self._choose(which))
                if choice is None:
                    return None
                looks = gather_objects((socket.gethostname(), *self._look(choice), str(self._path)))
                self._all_see(choice, looks)
                wrong = [
                    f"{text} (seen by rank {rank} on {host})" for rank, (host, _, text, _) in enumerate(looks) if text
                ]
                if not wrong:
                    hold, self._hold = self._hold, None
                    assert hold is not None  # _look() has nothing to say only if it holds
                    folder = self._path / choice.where
                    return listing.Found(folder, int(choice.manifest["step"]), choice.manifest), hold
                self._release()
                self._refused.add((choice.where, choice.manifest["serial"]))
                if not newest:
                    raise CheckpointError(
                        f"The checkpoint {choice.where} is not whole.",
                        evidence=[f"folder: {self._path}", *wrong[:_SHOWN]],
                        cure="Take another one: 'latest' finds the newest whole one.",
                    )
                self._tell(choice.where, wrong[0])
        finally:
            self._release()

    # On the main rank -----------------------------------------------------------------------------------------

    def _choose(self, which: str | int | Path) -> _Choice | None:
        """The next checkpoint to look at; the main rank holds it from now on."""
        for _ in range(_VANISHED_AT_MOST):
            found = self._latest() if which == "latest" else self._named(which)
            if found is None:
                return None
            try:
                self._hold = holding.Hold(found.path)
            except manifest.Unfit:
                time.sleep(0.001)
                continue
            inside = found.path.parent == self._path
            return _Choice(found.path.name if inside else str(found.path.absolute()), found.manifest)
        raise CheckpointError(
            f"Checkpoints in {self._path} are deleted faster than they can be read.",
            cure="Keep more of them: Checkpoints(keep=2)",
        )

    def _latest(self) -> Found | None:
        seen = listing.look(self._path)
        for name, why in seen.unfit:
            self._tell(name, why)
        return next((one for one in seen.whole if (one.path.name, one.serial) not in self._refused), None)

    def _tell(self, name: str, why: str) -> None:
        if self._session.is_main and name not in self._told:
            self._told.add(name)
            get_logger("instep").warning("passed over %s in %s: %s", name, self._path, why)

    def _named(self, which: str | int | Path) -> Found | None:
        if isinstance(which, int) and not isinstance(which, bool):
            return self._of_step(which, f"There is no checkpoint of step {which}.")
        if which == "best":
            try:
                step = listing.best_step(self._path)
            except manifest.Unfit as error:
                raise self._none_there("Nobody knows which checkpoint is the best.", str(error)) from None
            return None if step is None else self._of_step(step, f"The best checkpoint, of step {step}, is not there.")
        if isinstance(which, (str, Path)) and str(which) not in ("", "."):
            return self._at(Path(which))
        raise CheckpointError(
            f"There is no checkpoint {which!r}.", cure="Ask for 'latest', 'best', a step such as 100, or a path."
        )

    def _of_step(self, step: int, what: str) -> Found:
        seen = listing.look(self._path)
        found = next((one for one in seen.whole if one.step == step), None)
        if found is None:
            raise self._none_there(what)
        return found

    def _at(self, path: Path) -> Found:
        try:
            return listing.whole_at(path, names.step_of(path.name))
        except manifest.Unfit as error:
            why = str(error)
        if not path.exists():
            raise self._none_there(f"There is no checkpoint at {path}.", "no such folder")
        inside = listing.look(path).whole if path.is_dir() else []
        if inside:
            raise CheckpointError(
                f"{path} is a folder of checkpoints, not one of them.",
                evidence=[", ".join(one.path.name for one in inside[:20])],
                cure=f"Name one:  {inside[0].path}",
            )
        raise CheckpointError(f"{path} is no whole checkpoint.", evidence=[why])

    def _none_there(self, what: str, *evidence: str) -> CheckpointError:
        try:
            lines = listing.look(self._path).lines()
        except OSError as error:
            lines = [str(error)]
        return CheckpointError(
            what,
            evidence=[f"folder: {self._path}", *evidence, *lines],
            cure="Ask for one of these, or for 'latest'.",
        )

    # On every rank --------------------------------------------------------------------------------------------

    def _look(self, choice: _Choice) -> tuple[bool, str]:
        """(whether this rank sees the checkpoint, what is wrong with it). Each rank sums up its share of the files."""
        folder = self._path / choice.where

        def unseen() -> list[str]:
            try:
                mine = manifest.read(folder)
            except manifest.Unfit as error:
                return [str(error)]
            if mine["checksum"] != choice.manifest["checksum"]:
                return [f"another checkpoint than the main rank's (written at another time: serial {mine['serial']})"]
            return manifest.wrong_sizes(folder, mine)

        if wrong := wait_until_empty(unseen, 0.0 if self._session.is_main else self._within_s):
            # The main rank has just seen it whole: for it this is damage, for the others it is not (yet) visible.
            return self._session.is_main, f"{folder}: {', '.join(wrong[:_SHOWN])}"
        if self._hold is None:
            try:
                self._hold = holding.Hold(folder)
            except manifest.Unfit as error:
                return True, str(error)
        mine = sorted(choice.manifest["files"])[self._session.rank :: self._session.world_size]
        return True, ", ".join(manifest.corrupt(folder, choice.manifest, mine)[:_SHOWN])

    def _all_see(self, choice: _Choice, looks: list[tuple[str, bool, str, str]]) -> None:
        blind = [f"rank {rank} on {host}: {text}" for rank, (host, sees, text, _) in enumerate(looks) if not sees]
        if blind:
            raise CheckpointError(
                f"Not all ranks see the checkpoint {choice.where} that the main rank has chosen.",
                evidence=[
                    f"rank 0 on {looks[0][0]} sees it in {looks[0][3]}",
                    *blind[:_SHOWN],
                    f"waited {self._within_s:g} s for it",
                ],
                cure="Keep checkpoints in a folder that all machines share (NFS), or copy this one to each of them.",
            )

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None
