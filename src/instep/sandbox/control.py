"""What is done to a sandbox that is up: look at it, cut a machine off, take its power away, start it again."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox import lifecycle, machines, network, processes, state
from instep.sandbox.locks import hold
from instep.sandbox.state import option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instep.sandbox.state import Machine, Sandbox


def the(name: str) -> Sandbox:
    """The sandbox of that name.

    Raises:
        RunError: there is none, or not any more.

    """
    found = state.load(name)
    others = [other for other in state.names() if state.load(other)]
    if found is None:
        raise RunError(
            f"there is no sandbox {name}",
            evidence=[f"there are: {', '.join(others)}"] if others else [],
            cure=f"instep sandbox status --name {others[0]}" if others else "instep sandbox up",
        )
    if found.boot != state.boot_id():
        raise RunError(
            f"sandbox {name} went with the last start of this host",
            evidence=[f"made by: {found.command}"],
            cure=f"instep sandbox down{option(found)}",
        )
    return found


@dataclass(frozen=True)
class Look:
    """How a machine is.

    Attributes:
        power: the process that carries it runs.
        ssh: something answers on its port 22, from this host.
        cut: it has no network.

    """

    name: str
    address: str
    power: bool
    ssh: bool
    cut: bool


def look(sandbox: Sandbox) -> Iterator[Look]:
    """How each machine is."""
    for machine in sandbox.machines:
        carrier = sandbox.running.get(machine.name)
        power = carrier is not None and processes.lives(carrier)
        cut = machine.name in sandbox.cut
        yield Look(machine.name, machine.address, power, power and not cut and _answers(machine.address, 22), cut)


def slurm_answers(sandbox: Sandbox) -> bool:
    """Slurm's controller can be reached from this host."""
    return sandbox.slurm and _answers(sandbox.machines[0].address, 6817)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def cut(name: str, node: str, *, off: bool) -> None:
    """Take a machine's network away, without a word to anybody (`off`), or give it back.

    Raises:
        RunError: there is no such machine.

    """
    with hold(the(name).folder, lambda: lifecycle.busy(name)):
        sandbox = the(name)
        machine = sandbox.machine(node)
        rest = [other for other in sandbox.cut if other != machine.name]
        sandbox.cut = sorted([*rest, machine.name]) if off else rest
        sandbox.save()
        network.set_cut(sandbox)


def kill(name: str, node: str) -> None:
    """Take a machine's power away.

    Raises:
        RunError: there is no such machine.

    """
    with hold(the(name).folder, lambda: lifecycle.busy(name)):
        sandbox = the(name)
        machine = sandbox.machine(node)
        machines.kill(sandbox, machine)
        sandbox.running.pop(machine.name, None)
        sandbox.save()


def start(name: str, node: str, tell: Callable[[str], None]) -> None:
    """Switch a machine on again, and wait until it answers, unless it is cut off.

    Raises:
        RunError: there is no such machine, it is on, or it does not come up.

    """
    with hold(the(name).folder, lambda: lifecycle.busy(name)):
        sandbox = the(name)
        machine = sandbox.machine(node)
        _refuse_running(sandbox, machine)
        machines.kill(sandbox, machine)  # what is left, if it switched itself off
        try:
            sandbox.running[machine.name] = machines.start(sandbox, machine)
            sandbox.save()
            if machine.name not in sandbox.cut:
                lifecycle.await_ready(sandbox, [machine], tell)
        except BaseException:
            machines.kill(sandbox, machine)
            raise


def _refuse_running(sandbox: Sandbox, machine: Machine) -> None:
    carrier = sandbox.running.get(machine.name)
    if carrier and processes.lives(carrier):
        raise RunError(f"{machine.name} is on", cure=f"instep sandbox kill{option(sandbox)} {machine.name}")
