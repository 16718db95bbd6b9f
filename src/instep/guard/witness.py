"""The eyes of a watch that is on another machine: tells it the signs of life of the ranks here, and answers it.

Knows nothing of the way that messages travel: see :mod:`instep.guard.nodes` for what they are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from instep.guard import stacks
from instep.guard.nodes import beats_message, views_message
from instep.guard.watch import LOOK_S, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SOON_S, _ANSWER_S = 0.05, 0.6  # while an answer is due; and how long ranks have for it, within the watch's time


class Witness:
    """Looks at the ranks of one machine.

    Args:
        folder: where their recorders write.
        world_size: number of ranks of the job.
        host: this machine's name.
        ranks: those that are here.

    """

    def __init__(self, folder: Path, world_size: int, host: str, ranks: Sequence[int]) -> None:
        self._folder = folder
        self._watch = Watch(folder, world_size, host, suspect_s=0, ranks=sorted(ranks))
        self._question: tuple[int, float] | None = None  # which one is to be answered, and when it came
        self._answered = 0
        self._told_at = self._looked_at = 0.0

    @property
    def next_at(self) -> float:
        """When :meth:`tell` has something to say, by the monotonic clock."""
        told = self._told_at + LOOK_S
        return told if self._question is None else min(told, self._looked_at + _SOON_S)

    def take(
        self, message: Mapping[str, Any], pids: Mapping[int, int], codes: Mapping[int, int | None]
    ) -> list[dict[str, Any]]:
        """Hear what the watch wants: "ask" and "stacks".

        Args:
            message: from the watch.
            pids: of the ranks that were started here.
            codes: exit codes of those that have ended.

        Returns:
            what is to be sent back now.

        """
        answers = []
        if "ask" in message:
            self._watch.read_beats(pids, codes)
            self._question = int(message["ask"]), time.monotonic()
            self._watch.ask(pids, codes)
        if "stacks" in message:
            alive = {rank: pid for rank, pid in pids.items() if rank not in codes}
            texts = stacks.collect(self._folder, alive, self._watch.views(pids, codes))
            answers.append({"stacks": {str(rank): text for rank, text in texts.items()}})
        return answers

    def tell(
        self, pids: Mapping[int, int], codes: Mapping[int, int | None], *, at_once: bool = False
    ) -> list[dict[str, Any]]:
        """What is to be sent now: signs of life, and the answer to the last question once the ranks have given it.

        Args:
            pids: of the ranks that were started here.
            codes: exit codes of those that have ended.
            at_once: something has happened that the watch wants to know.

        """
        found, now = [], time.monotonic()
        self._looked_at = now
        if at_once or now >= self._told_at + LOOK_S:
            self._told_at = now
            found.append(beats_message(self._watch.read_beats(pids, codes), codes))
        if self._question is not None:
            number, asked_at = self._question
            if self._watch.have_answered(codes, asked_at) or now > asked_at + _ANSWER_S:
                self._question, self._answered = None, number
                found.append(self._views(pids, codes))
        return found

    def last_words(self, pids: Mapping[int, int], codes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """All ranks have ended: what is known of them, for a watch that comes too late to ask."""
        return [beats_message(self._watch.read_beats(pids, codes), codes), self._views(pids, codes)]

    def _views(self, pids: Mapping[int, int], codes: Mapping[int, int | None]) -> dict[str, Any]:
        return views_message(self._folder, self._watch.views(pids, codes), self._answered)
