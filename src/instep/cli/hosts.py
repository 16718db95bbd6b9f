"""The three ways to name machines, for verbs that look at them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from instep.world.hosts import HostList

_LONGEST_S = 1e6  # more than any timer takes


def host_list(hosts: str | None, hostfile: Path | None, inventory: Path | None) -> HostList | None:
    """The machines that the user named; None without any.

    Raises:
        RunError: they are named in two ways, or not clearly.

    """
    from instep.world.hosts import parse_hosts, read_hostfile, read_inventory

    given = {"--hosts": hosts, "--hostfile": hostfile, "--inventory": inventory}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise RunError(f"machines are named by {' and by '.join(named)}", cure="name them in one of these ways")
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is not None:
        return read_hostfile(hostfile)
    return read_inventory(inventory) if inventory is not None else None


def others(names: Iterable[str]) -> list[str]:
    """Those that are not this machine, which needs no ssh."""
    from instep.launch.agents.ssh import is_here
    from instep.world.hosts import Host

    return [name for name in names if not is_here(Host(name))]


def check_seconds(option: str, seconds: float, *, least: float = 0.0) -> None:
    """Whether it is a time to wait.

    Raises:
        RunError: it is none.

    """
    if not (math.isfinite(seconds) and least <= seconds <= _LONGEST_S):
        raise RunError(f"{option} {seconds:g} is no time to wait", cure=f"give seconds, such as {option} 10")
