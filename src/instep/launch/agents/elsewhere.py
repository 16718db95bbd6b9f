"""``instep run`` on the head of an inventory: where mpirun, srun and sbatch are started."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.agents import ssh
from instep.launch.agents.crew import Crew
from instep.launch.agents.remote import Heart
from instep.launch.local import open_standard_streams
from instep.launch.ranks.signals import Signals
from instep.launch.running.output import Screen
from instep.launch.tasks.command import StoppedError
from instep.runs import exit_code_of
from instep.world.hosts import Host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instep.launch.agents.remote import Connection
    from instep.world.hosts import HostList

# As the command `instep` does it: the working folder holds the user's modules, and does not belong in front of ours.
_COMMAND = "import sys; sys.path[:1] = []; sys.argv[0] = 'instep'; from instep.cli import main; main()"


def is_elsewhere(hostlist: HostList | None) -> bool:
    """Whether the machines have a head, and it is another machine."""
    return hostlist is not None and bool(hostlist.head) and not ssh.is_here(_head(hostlist))


def _head(hostlist: HostList) -> Host:
    """The head as a machine; it may be one of those that run ranks."""
    return next((host for host in hostlist.hosts if host.name == hostlist.head), Host(hostlist.head))


def run_at(hostlist: HostList, words: Sequence[str], *, python: str = "", env: Sequence[str] = ()) -> int:
    """Run ``instep WORDS`` on the head, in the folder of the same path, as if it was typed there.

    What it prints comes here, signals go there, and nothing of it is left when this process or the connection ends.

    Args:
        hostlist: the machines; it has a head.
        words: what follows ``instep``.
        python: the interpreter there; "" is the same path as here.
        env: ``--env``.

    Returns:
        Its exit code.

    Raises:
        RunError: the head cannot be reached, or is lost.

    """
    open_standard_streams()
    head = _head(hostlist)
    way = ssh.Way(hostlist.ssh_config, python) if python else ssh.Way(hostlist.ssh_config)
    variables = ssh.environment(os.environ, env)
    marker = f"at-{head.name.rpartition('@')[2]}-{secrets.token_hex(6)}"

    def hello(host: Host) -> dict[str, Any]:
        del host
        return {"cwd": str(Path.cwd()), "environ": {**variables, "INSTEP_JOB": marker}, "target": None}

    with Signals() as signals, Heart() as heart, ExitStack() as at_end:
        crew = Crew([head], way, marker, hello=hello, signals=signals, heart=heart)
        at_end.callback(crew.close)
        try:
            crew.start([head.name])
            while crew.coming():
                crew.wait(0.5)
        except StoppedError as stopped:
            return 128 + stopped.number
        if not crew.up():
            raise crew.failures[head.name]
        connection = crew.connections[head.name]
        connection.ask("execute", {"argv": [way.python, "-c", _COMMAND, *words]})
        return _watch(crew, connection)


def _watch(crew: Crew, connection: Connection) -> int:
    """Pass on output one way, signals the other, until the command has ended."""
    screens = {1: Screen(1), 2: Screen(2)}
    while True:
        try:
            messages = crew.hear(connection.host, 1.0)
        except StoppedError as stopped:
            connection.ask("signal", {"number": stopped.number, "ranks": None})
            continue
        while crew.early:
            connection.ask("signal", {"number": crew.early.pop(0), "ranks": None})
        status = _take(messages, screens)
        if status is not None:
            return exit_code_of(status)
        if connection.is_lost:
            raise RunError(
                f"{connection.host}, where the run was started, is lost",
                evidence=[connection.why],
                cure=f"see what is left of it:  instep ps --hosts {connection.host}",
            )


def _take(messages: Iterable[dict[str, Any]], screens: dict[int, Screen]) -> int | None:
    """What the agent says; the status of the command where it has ended."""
    import base64

    for message in messages:
        if "output" in message:
            told = message["output"]
            screens[told["stream"]].write(base64.b64decode(told["data"]))
        elif "exited" in message:
            return int(message["exited"]["status"])
        elif "error" in message:
            said = message["error"]
            raise RunError(said["what"], evidence=said["evidence"], cure=said["cure"])
    return None
