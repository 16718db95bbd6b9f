"""A folder of checkpoints: save, find, load. On every rank, all ranks together."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.comm import agree, gather_objects, get_logger
from instep.comm.session import together
from instep.errors import CheckpointError
from instep.train.checkpoints import content, files, finding, manifest, names, reading, retention, shares, writing
from instep.train.checkpoints.held import Held
from instep.train.checkpoints.peers import Peers, main_decides
from instep.train.checkpoints.staging import Staging
from instep.train.checkpoints.wishes import count

if TYPE_CHECKING:
    from instep.comm.session import Session
    from instep.train.checkpoints.holding import Hold
    from instep.train.checkpoints.listing import Found

_GIVE_UP_WITHIN = 5.0  # seconds, in close() after an error


class CheckpointFolder:
    """A folder with checkpoints of one training, ``step-N`` each.

    ::

        folder = CheckpointFolder("checkpoints", keep=2)
        if found := folder.find("latest"):
            loaded = folder.load(found, state)
        for step in ...:
            for path in folder.save(step, state, shared={}, own={}, manifest={}):
                print("stands:", path)
        folder.close()

    All methods are called by all ranks together. A save that fails (a full disk) is a warning and no exception:
    training goes on, and the checkpoints before it stay; :attr:`failure` tells.

    Args:
        path: the folder; all ranks have to see it. It is made when the first checkpoint is saved.
        keep: how many of the newest checkpoints stay. The best one stays besides.
        asynchronous: whether training goes on while the files are written. It is held only while the tensors are
            copied; the copies stay in memory from the first save on.
        visible_within_s: how long a rank waits for files that another one has written (NFS shows them late).

    Attributes:
        path: the folder.
        held: the figures of each save, the last one last.
        failure: why the last save that has ended failed; None if it did not.

    Raises:
        CheckpointError: `keep` is no number of checkpoints.

    """

    def __init__(
        self, path: str | Path, *, keep: int = 2, asynchronous: bool = True, visible_within_s: float = 30.0
    ) -> None:
        count("CheckpointFolder(keep=...)", keep)
        self.path = Path(path).absolute()
        self.keep = keep
        self.asynchronous = asynchronous
        self.visible_within_s = visible_within_s
        self.held: list[Held] = []
        self.failure: CheckpointError | None = None
        self._peers: Peers | None = None
        self._staging = Staging()
        self._signatures: list[str] = []
        self._share: set[str] = set()
        self._thread: threading.Thread | None = None
        self._outcome = writing.Outcome()
        self._hold: Hold | None = None

    # Save -----------------------------------------------------------------------------------------------------

    def prepare(self, tensors: dict[str, Any] | None = None, shared: dict[str, Any] | None = None) -> None:
        """Make what saving needs, once: the folder, a line between the ranks, and the memory for the copies.

        The first :meth:`save` does it too; called before the training loop, no step of it has to wait.

        Args:
            tensors: the state that will be saved; None: leave its copies to the first save.
            shared: as for :meth:`save`.

        Raises:
            CheckpointError: not all ranks see the folder, or it cannot be written to.

        """
        session = together("CheckpointFolder.prepare")
        if self._peers is None:
            self._check_folder(session)
            self._peers = Peers(session)
        if tensors is not None and self.asynchronous:
            parts = [content.Parts(tensors), content.Parts(shared or {}, reading.SHARED)]
            everything = {key: one for part in parts for key, one in part.tensors.items()}
            self._divide(everything, gather_objects(shares.signature(everything)))
            self._staging.copy(self._mine(everything))

    def save(
        self,
        step: int,
        tensors: dict[str, Any],
        shared: dict[str, Any],
        own: dict[str, Any],
        manifest: dict[str, Any],
        *,
        best: bool = False,
    ) -> list[Path]:
        """Save a checkpoint; a former one of the same step is replaced by it.

        Args:
            step: optimizer updates done.
            tensors: the nested state of model and optimizer: tensors (parts of bigger ones too, as FSDP has them),
                and plain values that are the same on all ranks.
            shared: further state that is the same on all ranks: the main rank's is written.
            own: this rank's own state, such as its random generators'.
            manifest: what JSON takes, for people and for the resume: epoch, position, seed and the like.
            best: whether it is the best one so far.

        Returns:
            The checkpoints that stand since the last call of save(), poll() or wait(): this one too when not
            asynchronous.

        Raises:
            CheckpointError: the state holds what cannot be kept, or not all ranks see the folder. Nothing was written.

        """
        begin = time.perf_counter()
        session = together("CheckpointFolder.save")
        news = self._end()  # one at a time: the copies of the last one may still be in use
        held = Held(step, waited_s=time.perf_counter() - begin)
        job, everything = self._job(session, step, tensors=tensors, shared=shared, own=own, given=manifest, best=best)
        self.prepare()
        mine = self._mine(everything)
        held.size = sum(one.numel() * one.element_size() for one in map(_part, mine.values()))
        job.tensors = mine
        if self.asynchronous:
            begin_copy = time.perf_counter()
            try:
                job.tensors = self._staging.copy(mine)
            except (MemoryError, RuntimeError) as error:
                job.problem = f"no copy of the tensors could be made: {error}"
            held.staged_s = time.perf_counter() - begin_copy
        self.held.append(held)
        self._thread = threading.Thread(
            target=self._run, args=(job, held, begin), name="instep checkpoint", daemon=True
        )
        if self.asynchronous:
            self._thread.start()
        else:
            self._thread.run()
            news += self._end()
        held.stall_s = time.perf_counter() - begin
        return news

    def poll(self) -> list[Path]:
        """Look whether the save under way has ended. Does not wait.

        A collective as long as a save is under way, nothing at all otherwise.

        Returns:
            The checkpoints that stand since the last call of save(), poll() or wait().

        """
        if self._thread is None or not agree(not self._thread.is_alive(), how="all"):
            return []
        return self._end()

    def wait(self) -> list[Path]:
        """Let the save that is under way come to its end; what :meth:`poll` returns."""
        return self._end()

    def close(self, *, wait: bool = True) -> list[Path]:
        """Wait for the save that is under way, and give back what saving needed.

        Args:
            wait: False after an error on this rank alone: the others may not come, so this is no collective, and the
                save is left alone after a few seconds.

        Returns:
            What :meth:`poll` returns.

        """
        news: list[Path] = []
        self._let_go()
        if wait:
            news = self._end()
        elif self._thread is not None:
            self._thread.join(_GIVE_UP_WITHIN)
            if self._thread.is_alive():
                return news  # its line to the others is in use
            self._thread = None
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self._staging.close()
        return news

    # Find and load --------------------------------------------------------------------------------------------

    def find(self, which: str | int | Path = "latest") -> Found | None:
        """A whole checkpoint, the same on all ranks. Every file of it was read and fits its checksum.

        It is not deleted by anybody until :meth:`load` has read it, or the next find(), or close().

        Args:
            which: ``"latest"``: the newest whole one, and a warning for each that was passed over; ``"best"``; the
                number of a step; or the path of a checkpoint, which may lie in another folder.

        Returns:
            None if there is none at all ("latest"), or none was marked as the best ("best").

        Raises:
            CheckpointError: the one that was named is not there or not whole; or not all ranks see the one that the
                main rank has chosen.

        """
        session = together("CheckpointFolder.find")
        self._let_go()
        answer = finding.Search(self.path, session, self.visible_within_s).run(which)
        if answer is None:
            return None
        found, self._hold = answer
        return found

    def load(self, found: Found, tensors: dict[str, Any]) -> reading.Loaded:
        """Fill a nested state from a checkpoint, in place; it may have been saved by another number of ranks.

        Args:
            found: what :meth:`find` gave.
            tensors: a state of the same keys and shapes as the one that was saved, or some of its first keys:
                ``{"model": ...}`` reads the model alone.

        Returns:
            The rest of what was saved.

        Raises:
            CheckpointError: it is of another model: the keys and shapes are listed, and nothing was changed.

        """
        session = together("CheckpointFolder.load")
        try:
            return reading.load(found, tensors, session)
        finally:
            self._let_go()

    # ----------------------------------------------------------------------------------------------------------

    def _job(
        self,
        session: Session,
        step: int,
        *,
        tensors: dict[str, Any],
        shared: dict[str, Any],
        own: dict[str, Any],
        given: dict[str, Any],
        best: bool,
    ) -> tuple[writing.Save, dict[str, Any]]:
        """What this rank will write, without its tensors yet; all tensors by key. Refuses alike on all ranks."""
        state, common = content.Parts(tensors), content.Parts(shared if session.is_main else {}, reading.SHARED)
        problems = state.problems + [f"shared: {one}" for one in common.problems]
        if not content.comes_back(own):
            found = content.Parts(own).problems or ["torch.load(weights_only=True) does not take it"]
            problems += [f"own: {one}" for one in found]
        bad_step = isinstance(step, bool) or not isinstance(step, int) or step < 0
        everything = state.tensors | common.tensors
        facts = gather_objects(
            (
                problems[:20],
                manifest.check_given(given),
                f"step={step!r}" if bad_step else "",
                shares.signature(everything),
                names.aside(0 if bad_step else step, "partial"),
                step,
            )
        )
        _refuse(facts)
        self._divide(everything, [fact[3] for fact in facts])
        plain = content.as_bytes({"state": state.plain, "shared": common.plain}) if session.is_main else b""
        job = writing.Save(step, facts[0][4], {}, plain, content.as_bytes(own), given, best)
        return job, everything

    def _divide(self, everything: dict[str, Any], signatures: list[str]) -> None:
        """Share the tensors out, again if on any rank they are not what they were the last time."""
        if signatures != self._signatures:
            session = together("CheckpointFolder.save")
            self._share = shares.divide(gather_objects(shares.whole_sizes(everything)))[session.rank]
            self._signatures = signatures

    def _mine(self, everything: dict[str, Any]) -> dict[str, Any]:
        whole = shares.whole_sizes(everything)
        return {key: one for key, one in everything.items() if key not in whole or key in self._share}

    def _run(self, job: writing.Save, held: Held, begin: float) -> None:
        """A save, in its thread."""
        assert self._peers is not None  # made by prepare()
        try:
            self._outcome = writing.carry_out(
                job, self.path, self._peers, keep=self.keep, visible_within_s=self.visible_within_s
            )
        except Exception as error:  # noqa: BLE001  # a line to a rank that is gone; told by _end()
            self._outcome = writing.Outcome(problems=[f"{type(error).__name__}: {str(error)[:300]}"])
        if self._outcome.committed:
            held.total_s = time.perf_counter() - begin

    def _end(self) -> list[Path]:
        """Wait for the thread; what all ranks then know of its save."""
        if self._thread is None:
            return []
        if self._thread.ident is not None:
            self._thread.join()
        self._thread = None
        outcomes = gather_objects(self._outcome)
        committed = outcomes[0].committed
        problems = list(dict.fromkeys(line for one in outcomes for line in one.problems))
        step = self.held[-1].step
        self.failure = None
        if not committed:
            self.failure = CheckpointError(
                f"The checkpoint of step {step} could not be written. The ones before it are still there.",
                evidence=[f"folder: {self.path}", *problems],
                cure="Make room on the disk, or give another folder.",
            )
            if together("CheckpointFolder").is_main:
                get_logger("instep").warning("%s", self.failure)
        for note in outcomes[0].notes if together("CheckpointFolder").is_main else ():
            get_logger("instep").warning("%s", note)
        return [self.path / committed] if committed else []

    def _check_folder(self, session: Session) -> None:
        """Let every rank see a file that the main rank makes in the folder; sweep up what dead processes left."""
        token = main_decides(session, self._make_token)
        path = self.path / token
        unseen = writing.wait_until_empty(
            lambda: [] if _sees(path) else [str(self.path)], 0.0 if session.is_main else self.visible_within_s
        )
        looks = gather_objects((socket.gethostname(), unseen, str(path)))
        blind = [f"rank {rank} on {host}: {one[0]}" for rank, (host, one, _) in enumerate(looks) if one]
        try:
            if blind:
                raise CheckpointError(
                    "Not all ranks see the folder of the checkpoints.",
                    evidence=[
                        f"rank 0 on {looks[0][0]} has made {looks[0][2]}",
                        *(f"{one}: it is not there" for one in blind[:10]),
                    ],
                    cure="Give a folder that all machines share (NFS).",
                )
        finally:
            if session.is_main:
                path.unlink(missing_ok=True)

    def _make_token(self) -> str:
        self.path.mkdir(parents=True, exist_ok=True)
        token = self.path / names.aside(0, "seen")
        files.write_new(token, b"")
        for name in retention.sweep(self.path, token.stat().st_mtime):
            get_logger("instep").info("removed %s: the process that wrote it is gone", self.path / name)
        return token.name

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None


def _sees(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no right to look
        return False


def _part(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _refuse(facts: list[tuple[list[str], str, str, str, str, int]]) -> None:
    """Raise the same on all ranks, whatever is wrong on any of them."""
    for rank, (problems, given, step, *_) in enumerate(facts):
        where = f" (rank {rank})" if len(facts) > 1 and rank else ""
        if step:
            raise CheckpointError(f"The step of a checkpoint is a whole number from 0 on{where}.", evidence=[step])
        if problems:
            raise content.refuse(problems, where)
        if given:
            raise manifest.refuse_given(given + where)
    steps = [fact[5] for fact in facts]
    if len(set(steps)) > 1:
        raise CheckpointError(
            "The ranks want to save different steps.",
            evidence=[f"rank {rank}: step {step}" for rank, step in enumerate(steps)][:10],
            cure="Call save() on all ranks at the same step.",
        )
