"""A run whose ranks mpirun or srun starts: from the request to the end of the record.

The tasks come first. Through them the machines are looked at, compared, and made to find where they can meet; only then
is there a plan, a run folder, and a rank.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from instep.errors import RunError
from instep.launch.agents.ssh import environment
from instep.launch.agents.watching import guard_over
from instep.launch.local import open_standard_streams
from instep.launch.planning.plan import Plan, Request, Site, make_plan
from instep.launch.preflight import compare, facts, meeting, shared
from instep.launch.ranks import kin
from instep.launch.ranks.server import raise_file_limit
from instep.launch.ranks.signals import Signals
from instep.launch.running.conduct import Conduct
from instep.launch.tasks.command import Command, StoppedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self  # for the type checker only: Python has it from 3.11 on

    from instep.launch.running.supervisor import Supervisor


class Starter(Protocol):
    """What starts the tasks.

    Attributes:
        name: the program, for people.
        title: with its version.
        via: "mpirun" or "slurm".
        port_key: see :class:`instep.launch.preflight.meeting.Listener`.
        ssh_config: what ssh is given for these machines; None for the user's own.
        limit_s: how long its tasks may take to call; None: as long as it lives.
        environ: what the program is started with.

    """

    name: str
    title: str
    via: str
    port_key: str
    ssh_config: Path | None
    limit_s: float | None
    environ: Mapping[str, str]

    def argv(self, parts: Sequence[tuple[str, int]], command: Sequence[str]) -> list[str]:
        """The command line that starts so many tasks on each of these machines."""

    def lost(self, host: str, marker: str) -> None:
        """A machine is lost, where processes with this marker may be left."""


@dataclass(frozen=True)
class Wish:
    """What the user asked for besides the request.

    Attributes:
        runs: the folder of all runs.
        name: of this one; None for the program's name and the time.
        command: what was typed, for the record.
        stdout: the descriptor that takes what ranks print to their standard output.
        own_copies: each machine has its own copy of the working folder, which is compared.
        copied: each machine has its own copy, just made by --sync.
        variables: set for the ranks (``--env``).
        hints: machine -> address where the user says that it is reached.
        python: the interpreter on the machines; "" is this one.
        going_on: the folder of a run that goes on.

    """

    runs: Path
    name: str | None = None
    command: Sequence[str] = ()
    stdout: int = 1
    own_copies: bool = False
    copied: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    going_on: Path | None = None


def run_tasks(
    request: Request, starter: Starter, parts: Sequence[tuple[str, int | None]], wish: Wish
) -> dict[str, Any]:
    """Have the ranks started, watch them to their end, and keep the record.

    Args:
        request: what the user wants.
        starter: mpirun or srun.
        parts: machines and their numbers of ranks; None is to be found out by a look at the machine.
        wish: the rest.

    Returns:
        what stands in ``run.json``, and the "folder"; where a signal came before anything was started, the outcome and
        the exit code alone.

    Raises:
        RunError: the run could not be started, or its folder could not be written; nothing is left running.

    """
    open_standard_streams()
    kin.adopt_orphans()
    with Signals() as signals:
        try:
            counted = _count(request, starter, parts, wish, signals)
            with _Start(request, starter, counted, wish, signals) as start:
                run, job = start.carry_out()
        except StoppedError as stopped:
            return {"outcome": "interrupted", "exit_code": 128 + stopped.number}
    return run.conclude(job)


def plan_tasks(
    request: Request, starter: Starter, parts: Sequence[tuple[str, int | None]], wish: Wish
) -> tuple[Plan, int]:
    """Look at the machines and find where they can meet, by tasks that start no rank: the plan, and the port.

    Raises:
        RunError: the run could not be started.

    """
    open_standard_streams()
    kin.adopt_orphans()
    with Signals() as signals:
        try:
            counted = _count(request, starter, parts, wish, signals)
            with _Start(request, starter, counted, wish, signals) as start:
                return start.plan()
        except StoppedError as stopped:
            error = RunError("interrupted")
            error.exit_code = 128 + stopped.number
            raise error from None


def _count(
    request: Request, starter: Starter, parts: Sequence[tuple[str, int | None]], wish: Wish, signals: Signals
) -> list[tuple[str, int]]:
    """The number of ranks for each machine, where need be by a look at the machines."""
    if request.nproc != "auto" and not request.nproc.isdigit():
        make_plan(
            request, [Site("here", facts.machine_of(_own_facts(request, wish)))], os.environ
        )  # says what is wrong
    given = 1 if request.device == "cpu" else None
    wanted = int(request.nproc) if request.nproc.isdigit() else given
    known = [(host, count or wanted) for host, count in parts]
    if all(count for _, count in known):
        return [(host, count) for host, count in known if count]
    with _Start(request, starter, [(host, 1) for host, _ in parts], wish, signals) as start:
        sites = [
            Site(answer.host, facts.machine_of(answer.facts), count)
            for answer, (_, count) in zip(start.look(), known, strict=True)
        ]
        return [(node.host, node.place.count) for node in make_plan(request, sites, os.environ).nodes]


def _own_facts(request: Request, wish: Wish) -> dict[str, Any]:
    return facts.gather(facts.ask(request.target, Path.cwd(), wish.runs, code=wish.own_copies))


class _Start:
    """The tasks of one start, from the command's first word to its last."""

    def __init__(
        self, request: Request, starter: Starter, parts: Sequence[tuple[str, int]], wish: Wish, signals: Signals
    ) -> None:
        self._request, self._starter, self._wish, self._signals = request, starter, wish, signals
        self._parts: list[tuple[str, range]] = []
        first = 0
        for host, count in parts:
            self._parts.append((host, range(first, first + count)))
            first += count
        raise_file_limit(first)
        self._command = Command(
            starter.name,
            starter.argv(parts, [wish.python or sys.executable, "-m", "instep.launch.tasks.task"]),
            world_size=first,
            addresses=[address for _, address, _ in facts.interfaces()],
            environ=starter.environ,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._command.close()

    def look(self) -> list[compare.Answer]:
        """Wait for the tasks; the machines then, each looked at and all compared.

        Raises:
            RunError: they do not come, or are not where or as they should be.
            StoppedError: somebody wants an end.

        """
        self._command.meet(self._signals, _say, parts=self._parts, limit_s=self._starter.limit_s)
        self._see_places()
        wish = self._wish
        if wish.own_copies or wish.copied:
            return self._compare(None)
        with shared.Token(wish.runs) as token:
            return self._compare(token)

    def _compare(self, token: shared.Token | None) -> list[compare.Answer]:
        wish = self._wish
        asked = facts.ask(self._request.target, Path.cwd(), wish.runs, token=token, code=wish.own_copies)
        leaders = {ranks[0]: asked for _, ranks in self._parts}
        before = time.time()
        found = self._command.ask("look", leaders, self._signals)
        after = time.time()
        answers = [
            compare.Answer(host, found[ranks[0]], before, after, token.seen(found[ranks[0]]) if token else "")
            for host, ranks in self._parts
        ]
        notes = compare.check(answers, _own_facts(self._request, wish), own_copies=token is None)
        _say([f"… {note}" for note in notes])
        return answers

    def _see_places(self) -> None:
        """Whether each machine has its ranks, and no others: never so many worlds of one."""
        said = {rank: task.said for rank, task in self._command.tasks.items()}
        machines = [{said[rank]["machine"] for rank in ranks} for _, ranks in self._parts]
        if all(len(found) == 1 for found in machines) and len(set.union(*machines)) == len(machines):
            return
        raise RunError(
            f"{self._starter.name} has not put the ranks where they belong",
            evidence=[
                f"rank {rank}: on {said[rank]['host']}, not on {host}"
                if said[rank]["host"] != host
                else f"rank {rank}: on {host}"
                for host, ranks in self._parts
                for rank in ranks
            ],
            cure="see whether two of the names mean one machine, or start the ranks without it:  --via ssh",
        )

    def carry_out(self) -> tuple[Conduct, Supervisor]:
        """All of it."""
        plan, port = self.plan()
        self._command.compare_clocks(self._signals)
        return self._start_ranks(plan, port)

    def plan(self) -> tuple[Plan, int]:
        """The plan, and the port that is held on the main machine."""
        answers = self.look()
        found, port = self._find_meeting(answers)
        sites = [
            Site(answer.host, facts.machine_of(answer.facts), len(ranks), address, interface)
            for answer, (_, ranks), (address, interface) in zip(answers, self._parts, found.ways, strict=True)
        ]
        sites[0] = replace(sites[0], address=found.address)
        return make_plan(self._request, sites, os.environ), port

    def _find_meeting(self, answers: Sequence[compare.Answer]) -> tuple[meeting.Meeting, int]:
        """Where the ranks can meet; the port is held from now on."""
        token = secrets.token_hex(16)
        leaders = [ranks[0] for _, ranks in self._parts]
        ports = facts.machine_of(answers[0].facts).ports
        asked = {
            rank: {"token": token, "ports": ports if rank == leaders[0] else None, "key": self._starter.port_key}
            for rank in leaders
        }
        heard = self._command.ask("listen", asked, self._signals)
        for answer in heard.values():
            if "error" in answer:
                what, evidence, cure = answer["error"]
                raise RunError(what, evidence=evidence, cure=cure)
        port = int(heard[leaders[0]]["port"])
        if len(leaders) == 1:
            return meeting.choose([meeting.Party(answers[0].host, answers[0].facts)]), port
        hints = [self._wish.hints.get(answer.host, answer.host) for answer in answers]
        peers = [
            {
                "host": answer.host,
                "addresses": meeting.addresses_of(answer.facts, hint),
                "port": heard[rank]["port"],
                "token": token,
            }
            for answer, rank, hint in zip(answers, leaders, hints, strict=True)
        ]
        whom = {rank: meeting.whom(peers, number) for number, rank in enumerate(leaders)}
        reached = self._command.ask("reach", whom, self._signals)
        parties = [
            meeting.Party(answer.host, answer.facts, reached[rank])
            for answer, rank in zip(answers, leaders, strict=True)
        ]
        return meeting.choose(parties, hints[0]), port

    def _start_ranks(self, plan: Plan, port: int) -> tuple[Conduct, Supervisor]:
        wish = self._wish
        run = Conduct(
            plan,
            runs=wish.runs,
            name=wish.name,
            command=list(wish.command),
            port=port,
            via=self._starter.via,
            piped=False,
            stdout=wish.stdout,
            going_on=wish.going_on,
        )
        run.record.ssh_config = str(self._starter.ssh_config) if self._starter.ssh_config else None
        run.say(run.reporter.teller.start(plan, port, run.folder))
        folders = self._let_watch(run)
        self._command.on_lost = lambda host: self._starter.lost(host, run.record.job)
        servers = self._command.servers(self._parts, run.folder / "log" / f"{self._starter.name}.txt")
        for server, node in zip(servers, plan.nodes, strict=True):
            server.start(
                {
                    "kind": plan.target.kind,
                    "name": plan.target.name,
                    "arguments": plan.target.arguments,
                    "place": asdict(node.place),
                    "port": port,
                    "marker": run.record.job,
                    "folder": str(run.folder.absolute()),
                    "cwd": str(Path.cwd()),
                    "environ": {
                        **environment(os.environ, ()),
                        **wish.variables,
                        **node.variables,
                        "INSTEP_RUN": str(run.folder.absolute()),
                        "INSTEP_JOB": run.record.job,
                        **({"INSTEP_GUARD": folders[server.ranks[0]]} if folders else {}),
                    },
                }
            )
        guarding = guard_over(run, servers) if folders else None
        try:
            return run, run.watch(servers, self._signals, guarding)
        finally:
            if guarding is not None:
                guarding.close()

    def _let_watch(self, run: Conduct) -> dict[int, str]:
        """Have one task on each machine see its ranks for the guard; by its rank, the folder for their records."""
        plan = run.plan
        if plan.guard == "off" or plan.world_size == 1:
            return {}
        asked = {node.place.first_rank: {"place": asdict(node.place), "host": node.name} for node in plan.nodes}
        said = self._command.ask("watch", asked, self._signals)
        whys = [f"{plan.node_of(rank).host}: {one['why']}" for rank, one in said.items() if "why" in one]
        if whys:
            teller = run.reporter.teller
            run.say([teller.note(f"the ranks are not watched: no folder for their records ({'; '.join(whys)})")])
            return {}
        return {rank: one["folder"] for rank, one in said.items()}


def _say(lines: Sequence[str]) -> None:
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
