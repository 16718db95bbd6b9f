"""Machines, whatever they are made as: switch one on, take its power away, run a command on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox import containers, layer, network, processes, vms
from instep.sandbox.state import User, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.sandbox.files import File
    from instep.sandbox.state import Machine, Process, Sandbox

ROOT = User("root", 0, 0, "root", "/root")


def prepare(sandbox: Sandbox, machine: Machine, files: Mapping[str, File]) -> None:
    """Lay down a machine's own files, before its first start.

    Raises:
        RunError: a disk cannot be made.

    """
    if sandbox.kind == "vms":
        layer.lay(sandbox, machine, {**files, **vms.files(sandbox, machine)})
        vms.make_disks(sandbox, machine)
    else:
        layer.lay(sandbox, machine, files)


def start(sandbox: Sandbox, machine: Machine) -> Process:
    """Switch a machine on.

    Returns:
        the process that carries it, which outlives this one.

    Raises:
        RunError: it could not be started.

    """
    return vms.start(sandbox, machine) if sandbox.kind == "vms" else containers.start(sandbox, machine)


def kill(sandbox: Sandbox, machine: Machine) -> None:
    """Take a machine's power away: its cable first, so that no word of its end gets out."""
    network.unwire(sandbox, machine)
    processes.end(sandbox.place(machine))
    containers.remove_cgroups(containers.cgroup(sandbox, machine))


def enter(sandbox: Sandbox, machine: Machine, argv: Sequence[str], name: str = "root") -> list[str]:
    """The command line that runs a command on a machine, from its console if it has one.

    It starts in the current folder if the machine has it, and in the user's home otherwise.

    Raises:
        RunError: the machine is off, or the user is not known there.

    """
    people = {user.name: user for user in (sandbox.user, ROOT)}
    if name not in people:
        raise RunError(f"there is no user {name!r} on {machine.name}", cure=f"one of: {', '.join(sorted(people))}")
    carrier = sandbox.running.get(machine.name)
    command = None
    if carrier and processes.lives(carrier):
        way = vms.enter if sandbox.kind == "vms" else containers.enter
        command = way(sandbox, machine, argv, people[name])
    if command is None:
        raise RunError(f"{machine.name} is off", cure=f"instep sandbox start{option(sandbox)} {machine.name}")
    return command
