"""After a machine was lost: one more look at it over a new connection, and an end to what it still has of the job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from instep.launch.registry.ending import end_here
from instep.launch.registry.errand import send

if TYPE_CHECKING:
    from instep.launch.agents.ssh import Way

SWEEP_S = 3.5  # the agent there ends all by itself when it hears nothing; this is for one that was killed


class Sweep:
    """Ends the processes that carry the job's marker, by their ids, on one machine; runs by itself.

    Attributes:
        ended: names of the processes that were still there.
        why: why the machine could not be looked at, "" where it could.

    """

    def __init__(self, host: str, marker: str, way: Way, *, is_here: bool) -> None:
        self.host = host
        self.ended: list[str] = []
        self.why = ""
        self._marker, self._way, self._is_here = marker, way, is_here
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        if self._is_here:
            self.ended = list(end_here(self._marker, None, 0.0).told)
            return
        errand = {"do": "end", "job": self._marker, "record": None, "grace": 0.0}
        (answer,) = send(errand, [self.host], self._way, SWEEP_S)
        self.why = answer.why
        self.ended = list(answer.values.get("ended", {}).get("told", ()))

    def wait(self) -> None:
        """Until it is done, or has taken its time."""
        self._thread.join(SWEEP_S + 1.0)
