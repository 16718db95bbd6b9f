"""The callbacks that are there unless you say otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.train.callbacks.log import MetricsLog
from instep.train.callbacks.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from instep.train.events import Callback


def default_callbacks(
    callbacks: Iterable[Callback] = (), *, folder: Path | None = None, progress: bool = True
) -> list[Callback]:
    """The user's callbacks, then those that are on by default: the progress bar, and the log where there is a folder.

    A callback of the same class in `callbacks` takes the place of the default one. The defaults come last, so that
    they neither move the others in a checkpoint nor report before they have spoken.

    Args:
        callbacks: the user's own.
        folder: the run folder; without one there is no metrics log.
        progress: False: no progress bar.

    """
    given = list(callbacks)
    if progress and not any(isinstance(one, ProgressBar) for one in given):
        given.append(ProgressBar())
    if folder is not None and not any(isinstance(one, MetricsLog) for one in given):
        given.append(MetricsLog())
    return given
