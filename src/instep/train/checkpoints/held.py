"""How long a save held the training thread, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Held:
    """The figures of one save, on this rank.

    Attributes:
        step: of the checkpoint.
        stall_s: seconds that the training thread was held, all told.
        waited_s: seconds of these that went into waiting for the save before.
        staged_s: seconds of these that went into copying the tensors (0 when not asynchronous).
        total_s: seconds from the call until the checkpoint stood; NaN as long as it does not.
        size: bytes of the tensors that this rank wrote.

    """

    step: int
    stall_s: float = 0.0
    waited_s: float = 0.0
    staged_s: float = 0.0
    total_s: float = float("nan")
    size: int = 0
