"""Programs in which ranks fall out of step, and what has to be said of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A program, with the line where a rank leaves the common path marked ``# <- HERE``.

    Attributes:
        name: of the row.
        kinds: what may be said of it, with a bar between.
        ranks: those to be named.
        source: of its train.py, or of its files by name.
        nproc: how many ranks.

    """

    name: str
    kinds: str
    ranks: tuple[int, ...]
    source: str | dict[str, str]
    nproc: int = 3
