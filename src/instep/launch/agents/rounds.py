"""Round after round: the ranks start, and after a failure start again, on the machines that answer then."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.launch.agents.crew import LostError, Patience, together
from instep.launch.agents.remote import RemoteServer
from instep.launch.agents.watching import guard_over
from instep.launch.planning.plan import make_plan
from instep.launch.ranks.server import raise_file_limit
from instep.launch.running.conduct import Conduct
from instep.launch.tasks.command import StoppedError
from instep.runs import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from instep.launch.agents.crew import Crew
    from instep.launch.agents.remote import Connection
    from instep.launch.agents.several import Wish
    from instep.launch.planning.plan import Plan, Request
    from instep.launch.ranks.signals import Signals
    from instep.launch.running.supervisor import Supervisor

_LONGEST_PAUSE_S = 60.0
_MOMENT_S = 1.0  # for machines that are late, where as many are there as may be
_LATE_S = 11.0  # the same where the fewest are there: ssh gives up connecting after 10 s
_AGAIN_S = 2.0  # between attempts to reach a machine
_ATTEMPTS = 3  # to prepare a round, where machines are lost meanwhile
_NO_RESTART = {75, 130, 2}  # saved and wants to be started anew; Ctrl-C; wrong use


class Rounds:
    """One run from its first round to its last."""

    def __init__(
        self,
        request: Request,
        wish: Wish,
        crew: Crew,
        nodes: tuple[int, int],
        signals: Signals,
        *,
        environ: Mapping[str, str],
    ) -> None:
        from instep.launch.agents.several import Preflight

        self._request, self._wish, self._crew, self._signals = request, wish, crew, signals
        self._least, self._most = nodes
        self._environ = environ
        self._copied: set[Connection] = set()  # to whose machines --sync has copied the folder
        self._preflight = Preflight(request, wish, crew)

    def carry_out(self) -> tuple[Conduct, Supervisor]:
        """All of it.

        Raises:
            RunError: nothing could be started.
            StoppedError: somebody wanted an end before anything was.

        """
        self._call_all()
        members, plan, port = self._prepare(0)
        run = self._begin(plan, port)
        while True:
            job = self._round(run, plan, port, members)
            restart = plan.restart + 1
            if restart > plan.max_restarts or not self._may_restart(run, job):
                return run, job
            try:
                self._pause(run, restart)
                members, plan, port = self._prepare(restart)
            except StoppedError as stopped:
                job.failure, job.lost, job.signal = None, None, stopped.number
                return run, job
            except RunError as error:
                job.error = error
                return run, job
            is_same = [node.host for node in plan.nodes] == [node.host for node in run.plan.nodes]
            run.start_again(plan, port)
            if not is_same:
                teller = run.reporter.teller
                run.say([teller.note(line) for line in self._crew.absent(members)])
                run.say(teller.start(plan, port, run.folder))

    @staticmethod
    def _may_restart(run: Conduct, job: Supervisor) -> bool:
        """Whether this was a failure, and nobody wants the run to end."""
        outcome, code = run.judge(job)
        return outcome is Outcome.FAILED and code not in _NO_RESTART and not (job.error or job.wants_no_more)

    def plan_only(self) -> tuple[Plan, int, list[str]]:
        """The plan, the port, and notes; nothing is started.

        Raises:
            RunError: nothing could be.
            StoppedError: somebody wants an end.

        """
        self._call_all()
        members = self._assemble(self._first_wait_s)
        said: list[str] = []
        self._sync(members, said.extend, dry_run=True)
        self._preflight.to_be_copied = self._wish.sync
        plan, port = self._plan(members, 0)
        return plan, port, said + self._preflight.notes

    def _call_all(self) -> None:
        raise_file_limit(len(self._crew.hosts))
        self._crew.start(self._crew.hosts)

    @property
    def _first_wait_s(self) -> float:
        """Where all machines are meant to take part, one that is missing is a mistake and said at once."""
        return self._wish.node_wait if self._wish.nodes else 0.0

    def _prepare(self, restart: int) -> tuple[list[str], Plan, int]:
        """The machines of a round, the plan and the port. One that is lost meanwhile is done without, or waited for.

        Raises:
            RunError: it cannot be.
            StoppedError: somebody wants an end.

        """
        wait_s = self._wish.node_wait if restart else self._first_wait_s
        for attempt in range(_ATTEMPTS):
            members = self._assemble(wait_s)
            try:
                self._sync(members, self._crew.say)
                return members, *self._plan(members, restart)
            except LostError:
                if not wait_s or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _sync(self, members: Sequence[str], say: Callable[[list[str]], object], *, dry_run: bool = False) -> None:
        """Copy the working folder to those that are not this machine, and have not got it before."""
        fresh = {name: self._crew.connections[name] for name in members}
        others = [name for name, one in fresh.items() if not (one.is_here or one in self._copied)]
        self._copied.update(fresh.values())
        if self._wish.sync and others:
            from instep.launch.preflight import sync

            ssh = self._crew.way.options()
            copied = sync.copy(
                Path.cwd(),
                others,
                ssh=ssh,
                runs=self._wish.runs,
                dry_run=dry_run,
                pause=self._crew.wait,
                say=lambda line: say([line]),
            )
            say(sync.lines(copied, dry_run=dry_run))

    def _plan(self, members: Sequence[str], restart: int) -> tuple[Plan, int]:
        sites, port = self._preflight.sites(members)
        return replace(make_plan(self._request, sites, self._environ), restart=restart), port

    def _begin(self, plan: Plan, port: int) -> Conduct:
        wish = self._wish
        raise_file_limit(plan.world_size + len(self._crew.hosts))
        run = Conduct(
            plan,
            runs=wish.runs,
            name=wish.name,
            command=list(wish.command),
            port=port,
            via=wish.via or ("ssh" if self._crew.is_remote else "local"),
            piped=False,
            stdout=wish.stdout,
            going_on=wish.going_on,
            job=self._crew.marker,
        )
        config = self._crew.way.ssh_config
        run.record.ssh_config = str(config) if config else None
        teller = run.reporter.teller
        absent = self._crew.absent([node.host for node in plan.nodes])
        run.say([teller.note(line) for line in [*self._preflight.notes, *absent]])
        run.say(teller.start(plan, port, run.folder))
        self._crew.say = run.say
        self._crew.on_words = lambda host, lines: run.say([f"[{host}] {line}" for line in lines])
        return run

    def _round(self, run: Conduct, plan: Plan, port: int, members: Sequence[str]) -> Supervisor:
        """Start the ranks and watch them to their end."""
        self._crew.watch_over(members)
        servers = []
        for name, node in zip(members, plan.nodes, strict=True):
            connection = self._crew.connections[name]
            connection.ask(
                "start",
                {
                    "place": asdict(node.place),
                    "port": port,
                    "folder": str(run.folder),
                    "variables": dict(node.variables),
                    "restart": plan.restart,
                    "max_restarts": plan.max_restarts,
                },
            )
            servers.append(RemoteServer(connection, node.place.ranks))
        early, self._crew.early = self._crew.early, []
        self._signals.put_back(early)
        guarding = guard_over(run, servers)
        try:
            return run.watch(servers, self._signals, guarding)
        finally:
            if guarding is not None:
                guarding.close()

    def finish(self, run: Conduct) -> None:
        """When the agents have gone: what was found on machines that were lost."""
        run.say([run.reporter.teller.note(line) for line in self._crew.finish_sweeps()])

    # Who takes part

    def _assemble(self, wait_s: float) -> list[str]:
        """The machines of the next round: those that answer, in the user's order.

        With as many as there may be, a moment is left for one that stands before them in the list; with fewer, all that
        may still answer are waited for.

        Args:
            wait_s: how long to wait until the fewest are there; 0: a machine that fails is not tried again.

        Raises:
            RunError: there are too few.
            StoppedError: somebody wants an end.

        """
        crew = self._crew
        deadline = time.monotonic() + wait_s
        enough_at: float | None = None
        patience = Patience()
        while True:
            now, up, coming = time.monotonic(), crew.up(), crew.coming()
            if len(up) < self._least:
                enough_at = None
                if now < deadline:
                    self._retry(now)
                elif not coming:
                    raise self._too_few(up)
            else:
                enough_at = enough_at or now
                if not coming or now > enough_at + (_MOMENT_S if len(up) >= self._most else _LATE_S):
                    return up[: self._most]
            if patience.is_over():
                crew.say([f"… waiting for {name}: {crew.why_not(name)}" for name in crew.hosts if name not in up])
            crew.wait(0.2)

    def _retry(self, now: float) -> None:
        """Try those again that have failed."""
        crew = self._crew
        lost = [name for name, one in crew.connections.items() if one.is_lost]
        crew.start([name for name in lost if now - crew.started_at[name] > _AGAIN_S])

    def _too_few(self, up: Sequence[str]) -> RunError:
        crew = self._crew
        failed = {
            name: crew.failures.get(name) or RunError(one.why) for name, one in crew.connections.items() if one.is_lost
        }
        error = together(failed)
        if self._least == len(crew.hosts) and not self._wish.nodes:
            return error
        return RunError(
            f"{len(up)} of the {self._least} machines that are needed answer; missing: {', '.join(failed)}",
            evidence=[error.what, *error.evidence],
            cure=error.cure,
        )

    def _pause(self, run: Conduct, restart: int) -> None:
        """After a failure: let some time pass, and look for those that were lost."""
        crew = self._crew
        self.finish(run)
        pause = min(_LONGEST_PAUSE_S, 2.0 ** (restart - 1))
        of = f"{restart} of {self._request.max_restarts}"
        lost = [name for name, one in crew.connections.items() if one.is_lost]
        run.say(run.reporter.teller.again(of, pause, lost))
        for name in crew.up():
            crew.connections[name].ask("again", None)  # torch is imported while we wait
        crew.start(lost, connect_s=5.0)
        crew.rest(pause)
