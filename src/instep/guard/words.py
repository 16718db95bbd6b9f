"""How ranks, operations and exits are named to people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.guard.records import Op


def name_ranks(ranks: Sequence[int]) -> str:
    """Some ranks: "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"


def they_wait(ranks: Sequence[int]) -> str:
    """Some ranks that wait: "rank 2 waits", "ranks 0 and 1 wait"."""
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def op_words(op: Op) -> str:
    """An operation and its line: "all_reduce [3] float32 (train.py:7)"."""
    shape = f" [{', '.join(str(one) for one in op.sizes[0])}]" if op.sizes else ""
    dtype = f" {op.dtypes[0]}" if op.dtypes else ""
    root = f" of rank {op.root}" if op.root is not None else ""
    place = op.user_site()
    at = f" ({Path(place.file).name}:{place.line})" if place else ""
    return f"{op.kind}{shape}{dtype}{root}{at}"


def exit_words(code: int | None) -> str:
    """How a process ended."""
    if code is None:
        return "has gone"
    if code >= 128 or code < 0:
        number = code - 128 if code >= 128 else -code
        return f"was ended by signal {number}"
    return f"ended with exit code {code}"
