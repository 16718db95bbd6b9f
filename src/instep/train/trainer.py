"""``instep.Trainer``."""

from __future__ import annotations


class Trainer:
    """The loop done right."""
