"""``--local-rank=N``, which torch.distributed.launch adds to the arguments of the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES = ("--local-rank", "--local_rank")  # since torch 2.0, before


def find(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(N, start, end): the value, and the slice of `argv` that holds the launcher's argument.

    The launcher puts it first, and the same number stands in LOCAL_RANK (if the launcher is not too old to set it):
    an argument of the script's own that happens to have the name is left alone.
    """
    if not env.get("RANK") or len(argv) < 2:
        return None
    name, equals, value = argv[1].partition("=")
    if name not in _NAMES:
        return None
    end = 2
    if not equals:
        value, end = (argv[2], 3) if len(argv) > 2 else ("", 2)
    if not value.isdigit() or env.get("LOCAL_RANK", value) != value:
        return None
    return int(value), 1, end
