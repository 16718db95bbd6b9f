"""Ranks on several machines, over agents: from the list of machines to the end of the record."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.agents import ssh
from instep.launch.agents.crew import Crew
from instep.launch.agents.remote import Heart
from instep.launch.agents.rounds import Rounds
from instep.launch.local import open_standard_streams
from instep.launch.planning.plan import Site
from instep.launch.preflight import compare, facts, meeting, shared
from instep.launch.ranks.signals import Signals
from instep.launch.tasks.command import StoppedError
from instep.runs.folder import default_name
from instep.world.hosts import Host, HostList

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from instep.launch.planning.plan import Plan, Request

LOOK_S = 60.0  # a cold network file system may be slow
LISTEN_S = 10.0
REACH_S = 15.0


@dataclass(frozen=True)
class Wish:
    """What the user asked for besides the request.

    Attributes:
        runs: the folder of all runs.
        name: of this one; None for the program's name and the time.
        command: what was typed, for the record.
        stdout: the descriptor that takes what ranks print to their standard output.
        nodes: the fewest and the most machines; None: all of the list.
        node_wait: seconds to wait for machines that are missing.
        sync: copy the working folder to the machines first.
        own_copies: each machine has its own copy of the working folder.
        python: the interpreter on the machines; "" is this one.
        env: ``--env``.
        way: how agents are started; None: by ssh.
        via: what the record says of that; "" is ssh, or local where all machines are this one.
        going_on: the folder of a run that goes on.

    """

    runs: Path
    name: str | None = None
    command: tuple[str, ...] = ()
    stdout: int = 1
    nodes: tuple[int, int] | None = None
    node_wait: float = 60.0
    sync: bool = False
    own_copies: bool = False
    python: str = ""
    env: tuple[str, ...] = ()
    way: ssh.Way | None = None
    via: str = ""
    going_on: Path | None = None


def here() -> HostList:
    """The list that has this machine alone."""
    return HostList((Host("localhost", source="this machine"),))


def run_there(request: Request, hostlist: HostList, wish: Wish) -> dict[str, Any]:
    """Start the ranks on these machines, watch them to their end, and keep the record.

    Args:
        request: what the user wants.
        hostlist: the machines.
        wish: the rest.

    Returns:
        what stands in ``run.json``, and the "folder"; where a signal came before anything was started, the outcome and
        the exit code alone.

    Raises:
        RunError: the run could not be started, or its folder could not be written; nothing is left running.

    """
    with _rounds(request, hostlist, wish) as rounds:
        try:
            run, job = rounds.carry_out()
        except StoppedError as stopped:
            return {"outcome": "interrupted", "exit_code": 128 + stopped.number}
    rounds.finish(run)
    return run.conclude(job)


@dataclass(frozen=True)
class Found:
    """What a look at the machines has brought.

    Attributes:
        plan: what would be done.
        port: where the ranks would meet.
        nodes: the fewest and the most machines.
        notes: on the machines, and on what would be copied.

    """

    plan: Plan
    port: int
    nodes: tuple[int, int]
    notes: list[str]


def plan_there(request: Request, hostlist: HostList, wish: Wish) -> Found:
    """Look at the machines, compare them and find where they can meet, and start nothing.

    Raises:
        RunError: the run could not be started.

    """
    with _rounds(request, hostlist, wish) as rounds:
        try:
            plan, port, notes = rounds.plan_only()
        except StoppedError as stopped:
            error = RunError("interrupted")
            error.exit_code = 128 + stopped.number
            raise error from None
    return Found(plan, port, check_nodes(wish.nodes, hostlist), notes)


@contextmanager
def _rounds(request: Request, hostlist: HostList, wish: Wish) -> Iterator[Rounds]:
    open_standard_streams()
    nodes = check_nodes(wish.nodes, hostlist)
    variables = ssh.environment(os.environ, wish.env)
    by_ssh = ssh.Way(hostlist.ssh_config, wish.python) if wish.python else ssh.Way(hostlist.ssh_config)
    way = wish.way or by_ssh
    marker = f"{default_stem(request)}-{secrets.token_hex(6)}"

    def hello(host: Host) -> dict[str, Any]:
        target = request.target
        return {
            "cwd": str(Path.cwd()),
            "environ": {**variables, "INSTEP_JOB": marker},
            "target": [target.kind, target.name, list(target.arguments)],
            "nproc": request.nproc,
            "device": request.device,
            "slots": host.slots,
            "guard": request.guard != "off",
        }

    with Signals() as signals, Heart() as heart, ExitStack() as at_end:
        crew = Crew(hostlist.hosts, way, marker, hello=hello, signals=signals, heart=heart)
        at_end.callback(crew.close)
        yield Rounds(request, wish, crew, nodes, signals, environ=variables)


def default_stem(request: Request) -> str:
    """A short name that may stand in a process's environment."""
    from datetime import datetime

    return default_name(request.target.stem, datetime.now())  # noqa: DTZ005  # local time, as in the folder's name


def check_nodes(nodes: tuple[int, int] | None, hostlist: HostList) -> tuple[int, int]:
    """The fewest and the most machines.

    Raises:
        RunError: there are not so many.

    """
    listed = len(hostlist.hosts)
    least, most = nodes or (listed, listed)
    if least < 1 or most < least:
        raise RunError(
            f"--nodes {least}:{most} is no range", cure="give --nodes N, or --nodes MIN:MAX with 1 ≤ MIN ≤ MAX"
        )
    if least > listed:
        raise RunError(
            f"--nodes asks for {least} machines at least, and {listed} are listed",
            evidence=[", ".join(host.name for host in hostlist.hosts)],
            cure="list more machines, or ask for fewer",
        )
    return least, min(most, listed)


class Preflight:
    """Looks at the machines, compares them, and finds where they can meet."""

    def __init__(self, request: Request, wish: Wish, crew: Crew) -> None:
        self._request, self._wish, self._crew = request, wish, crew
        self._is_alone = all(ssh.is_here(host) for host in crew.hosts.values())
        self._own_copies = wish.own_copies or wish.sync
        self.to_be_copied = False  # a dry run copies nothing, so what the folders hold does not matter yet
        self.notes: list[str] = []

    def sites(self, names: Sequence[str]) -> tuple[list[Site], int]:
        """The machines as the plan needs them, and the port that the first of them holds.

        Raises:
            RunError: they are not alike, or do not reach each other.
            StoppedError: somebody wants an end.

        """
        answers = self._look(names)
        found, port = self._meet(names, [answer.facts for answer in answers])
        sites = []
        for answer, (address, interface) in zip(answers, found.ways, strict=True):
            slots = self._crew.hosts[answer.host].slots
            sites.append(Site(answer.host, facts.machine_of(answer.facts), slots, address, interface))
        sites[0] = replace(sites[0], address=found.address)
        return sites, port

    def _look(self, names: Sequence[str]) -> list[compare.Answer]:
        with ExitStack() as at_end:
            looks = not (self._is_alone or self._own_copies)
            token = at_end.enter_context(shared.Token(self._wish.runs)) if looks else None
            asked = facts.ask(
                self._request.target, Path.cwd(), self._wish.runs, token=token, code=self._wish.own_copies
            )
            own = facts.gather(asked)
            said = self._crew.ask("look", dict.fromkeys(names, asked), LOOK_S)
            answers = [
                compare.Answer(
                    name,
                    said[name].value,
                    said[name].asked_at,
                    said[name].received_at,
                    token.seen(said[name].value) if token else "",
                )
                for name in names
            ]
        self.notes = compare.check(
            answers, own, own_copies=self._own_copies or self._is_alone, to_be_copied=self.to_be_copied
        )
        return answers

    def _meet(self, names: Sequence[str], known: Sequence[Mapping[str, Any]]) -> tuple[meeting.Meeting, int]:
        token = secrets.token_hex(16)
        main = {"token": token, "ports": facts.machine_of(known[0]).ports, "key": self._crew.marker}
        asked = {name: main if name == names[0] else {"token": token} for name in names}
        ports = self._crew.ask("listen", asked, LISTEN_S)
        port = int(ports[names[0]].value)
        if len(names) == 1:
            return meeting.choose([meeting.Party(names[0], known[0])]), port
        hints = [_hint(self._crew.hosts[name]) for name in names]
        peers = [
            {
                "host": name,
                "addresses": meeting.addresses_of(one, hint),
                "port": ports[name].value,
                "token": token,
            }
            for name, one, hint in zip(names, known, hints, strict=True)
        ]
        whom = {name: list(meeting.whom(peers, number)) for number, name in enumerate(names)}
        reached = self._crew.ask("reach", whom, REACH_S)
        parties = [meeting.Party(name, one, reached[name].value) for name, one in zip(names, known, strict=True)]
        return meeting.choose(parties, hints[0]), port


def _hint(host: Host) -> str:
    """Where the user says that the machine is reached, if that is an address."""
    import ipaddress

    said = host.address or host.name.rpartition("@")[2]
    try:
        ipaddress.ip_address(said)
    except ValueError:
        return ""
    return said
