"""What a checkpoint of training holds, and going on from one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.comm import agree, get_logger
from instep.data import fingerprint
from instep.errors import CheckpointError
from instep.train import seeds
from instep.train.checkpoints import CheckpointFolder, export
from instep.train.sharing import share_buffers

if TYPE_CHECKING:
    from instep.train.checkpoints import Checkpoints, Found
    from instep.train.trainer import Trainer

_log = get_logger("instep.train")


class Saver:
    """Saves a trainer into its folder of checkpoints, and brings it back.

    A checkpoint holds model, optimizer and the callbacks' states (tensors and plain values), the schedule, the scale
    of the loss, where training stands, and of each rank its random states: all that the next step depends on.

    Args:
        trainer: with its model and optimizer in place.
        wishes: where and how.

    Raises:
        CheckpointError: the folder cannot be made.

    """

    def __init__(self, trainer: Trainer, wishes: Checkpoints) -> None:
        self.trainer = trainer
        self.wishes = wishes
        place = wishes.folder or (trainer.folder or Path()) / "checkpoints"
        self.folder = CheckpointFolder(place, keep=wishes.keep, asynchronous=wishes.asynchronous)
        self._fingerprint = ""

    def look(self, which: str | int | Path) -> Found | None:
        """The checkpoint to go on from; None where ``"auto"`` finds none. All ranks call it.

        Raises:
            CheckpointError: there is none of that name, or a rank does not see it.

        """
        if which == "auto":
            return self.folder.find("latest")
        if isinstance(which, str) and which not in ("latest", "best"):
            which = Path(which)
        found = self.folder.find(which)
        if found is None:
            raise CheckpointError(
                f"There is no {which} checkpoint to resume from.",
                evidence=[f"looked in {self.folder.path}"],
                cure="resume='auto' begins anew where there is none.",
            )
        return found

    def save(self, *, best: bool = False) -> None:
        """Save what there is now; all ranks call it. A full disk is a warning, and training goes on."""
        trainer = self.trainer
        share_buffers(trainer.model, trainer.session)
        news = self.folder.save(
            trainer.progress.step, self._tensors(), self._shared(), seeds.random_states(), self._manifest(), best=best
        )
        self._tell(news)

    def poll(self) -> None:
        """Between two steps: see whether an asynchronous save has ended. All ranks call it."""
        self._tell(self.folder.poll())

    def finish(self, *, export_too: bool = True) -> None:
        """After training: see the last save through, and export the weights if that is wanted."""
        self._tell(self.folder.close())
        if self.wishes.export and export_too:
            state = self.trainer.strategy.full_model_state(self.trainer.wrapped)
            path = export(state, self.folder.path) if self.trainer.session.is_main else None
            if path is not None:
                _log.info("exported the weights: %s", path)

    def abandon(self) -> None:
        """After an error on this rank, perhaps alone: give a save that is under way a few seconds. No collective."""
        self.folder.close(wait=False)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder.path / f"step-{step}"

    def load_model(self, found: Found) -> None:
        """The weights alone; all ranks call it.

        Raises:
            CheckpointError: they are another model's.

        """
        self.folder.load(found, {"model": self.trainer.model.state_dict()})

    def resume(self, found: Found) -> None:
        """Put everything back; all ranks call it.

        Raises:
            CheckpointError: it is another model's.

        """
        trainer = self.trainer
        tensors = self._tensors()
        loaded = self.folder.load(found, tensors)
        trainer.strategy.load_state(trainer.wrapped, trainer.optimizer, tensors)
        shared = loaded.shared
        if trainer.schedule is not None and shared["schedule"] is not None:
            trainer.schedule.load_state_dict(shared["schedule"])
        trainer.precision.load_state_dict(shared["precision"])
        trainer.progress.load_state_dict(shared["progress"])
        trainer.results = dict(shared["results"])
        trainer.best = None if shared["best"] is None else (shared["best"][0], shared["best"][1])
        trainer.step.skipped = shared["skipped"]
        trainer.evaluated_at = shared["evaluated_at"]
        self._callbacks(shared["callbacks"])
        self._say(found, loaded.own is not None)
        if loaded.own is not None:
            seeds.restore_random_states(loaded.own)

    def _callbacks(self, states: dict[str, Any]) -> None:
        left = self.trainer.events.load_state_dict(dict(states))
        if left and self.trainer.session.is_main:
            _log.warning("the checkpoint has states of callbacks that are not here: %s", ", ".join(left))

    def _say(self, found: Found, same_states: bool) -> None:
        """What was found, and what could not be brought back."""
        trainer, progress = self.trainer, self.trainer.progress
        changed = agree(self.fingerprint != found.manifest["fingerprint"], how="any")
        position = progress.position
        if changed:
            progress.position = 0
        if not trainer.session.is_main:
            return
        _log.info(
            "resumed from %s: step %d, epoch %d, %d samples into it",
            found.path,
            progress.step,
            progress.epoch,
            position,
        )
        if changed:
            _log.warning("the training data are not those of the checkpoint: epoch %d begins anew", progress.epoch)
        if not same_states:
            _log.warning(
                "the checkpoint is of %s ranks: dropout and the like draw other numbers from here on than they "
                "would have",
                found.manifest["world_size"],
            )

    def _tell(self, news: list[Path]) -> None:
        for path in news:
            self.trainer.events.send("checkpoint", self.trainer, path)

    @property
    def fingerprint(self) -> str:
        """Of the training data."""
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.trainer.windows.loader.dataset)
        return self._fingerprint

    def _tensors(self) -> dict[str, Any]:
        trainer = self.trainer
        return trainer.strategy.state(trainer.wrapped, trainer.optimizer)

    def _shared(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "schedule": None if trainer.schedule is None else trainer.schedule.state_dict(),
            "precision": trainer.precision.state_dict(),
            "progress": trainer.progress.state_dict(),
            "results": dict(trainer.results),
            "best": None if trainer.best is None else list(trainer.best),
            "skipped": trainer.step.skipped,
            "callbacks": trainer.events.state_dict(),
            "evaluated_at": trainer.evaluated_at,
        }

    def _manifest(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            **trainer.progress.state_dict(),
            "seed": trainer.seed,
            "global_batch": trainer.global_batch,
            "fingerprint": self.fingerprint,
            "strategy": trainer.strategy.name,
            "precision": trainer.precision.name,
            "monitor": trainer.monitor,
            "best": None if trainer.best is None else list(trainer.best),
        }
