"""Slurm's shorthand for lists: ``rack[0-1]node[1-2]`` for hosts, ``2(x3),1`` for tasks per node.

ClusterShell's NodeSet reads the same hosts but sorts them. Here the order counts: the first host of the list is
where rank 0 runs. The tests compare with ``scontrol show hostnames``.
"""

from __future__ import annotations

import itertools
import re

from instep.errors import WorldError

_LIMIT = 1_000_000  # hosts; a typing error such as n[1-99999999] must not fill the memory


def expand(text: str) -> list[str]:
    """The host names of a Slurm node list, in its own order.

    Raises:
        WorldError: the text is no node list.

    """
    hosts = [host for item in _split(text) for host in _expand_one(item, text)]
    if not hosts:
        raise _unreadable(text, "it names no host")
    return hosts


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, from ``SLURM_TASKS_PER_NODE``: ``2(x3),1`` is ``[2, 2, 2, 1]``.

    Raises:
        WorldError: the text has another form.

    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if not match or int(match[2] or 1) > _LIMIT:
            raise WorldError(
                "SLURM_TASKS_PER_NODE cannot be read.",
                evidence=[f"SLURM_TASKS_PER_NODE={text!r}"],
                cure="Slurm writes it like 2(x3),1 - unset it if something else wrote it.",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """The items between the commas that stand outside of brackets."""
    return [item.strip() for item in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text) if item.strip()]


def _expand_one(item: str, text: str) -> list[str]:
    parts = re.split(r"\[([^\[\]]*)\]", item)
    if any("[" in part or "]" in part for part in parts[::2]):
        raise _unreadable(text, "its brackets do not match")
    choices = [_numbers(part, text) if odd % 2 else [part] for odd, part in enumerate(parts)]
    size = 1
    for choice in choices:
        size *= len(choice)
    if size > _LIMIT:
        raise _unreadable(text, f"it stands for {size} hosts")
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    """``01-03,07`` is ``["01", "02", "03", "07"]``: as wide as the first number is written."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if not match:
            raise _unreadable(text, f"{piece!r} is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _LIMIT:
            raise _unreadable(text, f"{piece!r} is no range that runs upwards")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _unreadable(text: str, why: str) -> WorldError:
    return WorldError(
        f"This is no node list of Slurm: {why}.",
        evidence=[repr(text)],
        cure="Slurm writes it like a[01-03,07],b5-ib or rack[0-1]node[1-2]; compare:  scontrol show hostnames 'LIST'",
    )
