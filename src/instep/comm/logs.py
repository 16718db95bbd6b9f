"""Logging in which the main rank speaks, and the others only when something is wrong."""

from __future__ import annotations

import logging
import os
import sys

from instep.world import joined

_FORMAT = "%(who)s%(levelname)s %(message)s"


def get_logger(name: str = "instep", *, level: int = logging.INFO, others: int = logging.WARNING) -> logging.Logger:
    """A logger of the standard library: the main rank speaks from `level` on, the other ranks from `others` on.

    Lines go to standard error, each with its rank when the world has several. The rank is looked up for each line,
    so the logger may be made before ``instep.init()``.

    Args:
        name: the logger's name; a second call with the same name gives the same logger.
        level: what the main rank lets through.
        others: what the other ranks let through.

    """
    logger = logging.getLogger(name)
    handler = next((one for one in logger.handlers if isinstance(one, _Handler)), None)
    if handler is None:
        handler = _Handler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    handler.levels = (level, others)
    logger.setLevel(min(level, others))
    return logger


class _Handler(logging.Handler):
    """Writes to what is sys.stderr at that moment, if this rank may speak."""

    levels = (logging.INFO, logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        rank, world_size = _who()
        if record.levelno < self.levels[0 if rank == 0 else 1]:
            return
        record.who = f"[rank {rank}] " if world_size > 1 else ""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


def _who() -> tuple[int, int]:
    """(rank, world_size), as far as they are known without any effort: a log line must never raise."""
    world = joined()
    if world is not None:
        return world.rank, world.world_size
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else (0, 1)
