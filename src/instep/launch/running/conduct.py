"""One run from its folder to its last line, whatever starts its ranks: the record, the logs, what the user is told."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep import __version__
from instep.launch.planning.machine import kernel_says_out_of_memory, out_of_memory_kills
from instep.launch.running.failure import Event, details
from instep.launch.running.output import Output, cannot_write
from instep.launch.running.supervisor import Listener, Lost, Supervisor
from instep.launch.running.telling import LOG_LINES, Teller, wants_colour
from instep.launch.slurm.state import own_job, own_restarts
from instep.runs import EXIT_OUT_OF_STEP, RunRecord, create_folder, default_name, git_facts, judge, now
from instep.runs.finding import read_record
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instep.launch.planning.plan import Plan
    from instep.launch.planning.target import Target
    from instep.launch.ranks.server import Server
    from instep.launch.ranks.signals import Signals
    from instep.launch.running.guarding import Guarding
    from instep.runs import Outcome

_FACTS_S = 10.0  # how long the end of a run waits for a slow git


class Conduct:
    """A run that is being carried out.

    Attributes:
        plan: what is done now; after a restart another one.
        folder: the run folder.
        record: what stands in ``run.json``.
        output: the logs and the screen.
        reporter: tells the user.

    """

    def __init__(
        self,
        plan: Plan,
        *,
        runs: Path,
        name: str | None,
        command: list[str],
        port: int,
        via: str = "local",
        piped: bool = True,
        stdout: int = 1,
        going_on: Path | None = None,
        job: str = "",
    ) -> None:
        """Make the folder, the record and the logs.

        Args:
            plan: what to do.
            runs: the folder of all runs.
            name: of this one; None for the program's name and the time.
            command: what was typed, for the record.
            port: where the ranks meet.
            via: what starts the ranks: local, ssh, mpirun or slurm.
            piped: whether the ranks are on this machine and write into pipes of ours.
            stdout: the descriptor that takes what ranks print to their standard output.
            going_on: the folder of a run that goes on, in the place of `runs` and `name`; its logs are appended to.
            job: the marker of its processes, where some of them are there already; "" for a new one.

        Raises:
            RunError: the folder cannot be made or written.

        """
        self._begin = time.monotonic()
        self.plan = plan
        self.folder = going_on or create_folder(runs, name, default_name(plan.target.stem, datetime.now()))  # noqa: DTZ005  # local
        self.record = _new_record(plan, self.folder, command, port, via)
        self.record.job = job or self.record.job
        if going_on and (going_on / "run.json").exists():
            self.record.go_on(read_record(going_on))
            self._begin -= (datetime.now().astimezone() - datetime.fromisoformat(self.record.start)).total_seconds()
        try:
            self.record.write(self.folder)
            self.output = Output(self.folder, _hosts_of_ranks(plan), plan.show, piped=piped, stdout=stdout)
        except OSError as error:
            raise cannot_write(self.folder / "run.json", error) from error
        for log in self.output.logs if self.record.requeues else []:
            if log.is_begun:
                log.write(f"--- started again by Slurm, restart {self.record.requeues}: {now()}\n".encode())
        self.reporter = _Reporter(self)
        self._facts: _Facts | None = None

    def say(self, lines: Iterable[str]) -> None:
        """Tell the user."""
        self.output.say(lines)

    def watch(self, servers: Sequence[Server], signals: Signals, guarding: Guarding | None = None) -> Supervisor:
        """Watch the ranks until all of them have gone."""
        job = Supervisor(servers, self.output, signals, self.reporter, grace=self.plan.grace, guarding=guarding)
        if self._facts is None:
            self._facts = _Facts(self.plan.target, self.folder, self.record)
        job.add_chore(self._facts.arrived)
        job.watch()
        if guarding and job.is_calm and not any(job.exit_codes.values()):
            guarding.last_look(job.exit_codes)
        return job

    def start_again(self, plan: Plan, port: int) -> None:
        """Another round of the same run, perhaps on other machines: new record, logs that go on.

        Raises:
            RunError: the run folder cannot be written.

        """
        self.plan = plan
        record = self.record
        record.hosts, record.world_size, record.threads = _names(plan), plan.world_size, plan.threads
        record.master, record.restarts = f"{plan.master_addr}:{port}", plan.restart
        before = self.output
        try:
            record.write(self.folder)
            self.output = before.renew(self.folder, _hosts_of_ranks(plan))
        except OSError as error:
            raise cannot_write(self.folder / "run.json", error) from error
        for log in self.output.logs:
            if log.is_begun:
                log.write(f"--- restart {plan.restart} of {plan.max_restarts}: {now()}\n".encode())

    def judge(self, job: Supervisor) -> tuple[Outcome, int]:
        """The outcome so far, and the exit code that goes with it."""
        return judge(job.exit_codes.values(), first_failure=_failure_code(job), signal=job.signal or None)

    def conclude(self, job: Supervisor) -> dict[str, Any]:
        """Write the end into run.json and onto the screen.

        Returns:
            what stands in ``run.json``, the "folder", and what the guard found.

        Raises:
            RunError: the run folder could not be written.

        """
        if self._facts is not None:
            self._facts.wait()
        record, seconds = self.record, time.monotonic() - self._begin
        record.end, record.seconds = now(), round(seconds, 3)
        record.exit_codes = {str(rank): job.exit_codes[rank] for rank in sorted(job.exit_codes)}
        record.outcome, record.exit_code = self.judge(job)
        record.first_failure = _first_failure(job, self.plan)
        record.signal = signal.Signals(job.signal).name if job.signal else None
        error = job.error
        try:
            record.write(self.folder)
        except OSError as failed:
            error = error or cannot_write(self.folder / "run.json", failed)
        if error is not None:
            raise error
        teller = self.reporter.teller
        lines = teller.leftovers(job.leftovers) if job.lost is None else []
        self.say(lines + teller.end(record.outcome, record.exit_code, seconds, self.folder))
        found = {"desync": job.verdict.as_json()} if job.verdict else {}
        return {**record.as_json(), "folder": str(self.folder), **found}


def _names(plan: Plan) -> list[str]:
    return [node.host if len(plan.nodes) > 1 else node.name for node in plan.nodes]


def _hosts_of_ranks(plan: Plan) -> list[str]:
    """The machine of each rank, "" where all are on one."""
    if len(plan.nodes) == 1:
        return [""] * plan.world_size
    return [plan.node_of(rank).host for rank in range(plan.world_size)]


def _new_record(plan: Plan, folder: Path, command: list[str], port: int, via: str) -> RunRecord:
    return RunRecord(
        name=folder.name,
        command=command,
        script=plan.target.name,
        arguments=list(plan.target.arguments),
        cwd=str(Path.cwd()),
        hosts=_names(plan),
        world_size=plan.world_size,
        device=plan.device,
        threads=plan.threads,
        master=f"{plan.master_addr}:{port}",
        job=f"{folder.name}-{secrets.token_hex(6)}",
        pid=os.getpid(),
        via=via,
        requeues=own_restarts(os.environ) if via == "slurm" else 0,
        slurm_job=own_job(os.environ) if via == "slurm" else None,
    )


def _failure_code(job: Supervisor) -> int | None:
    """The exit code that the first failure gives the run; None where nothing failed."""
    if job.error is not None:
        return job.error.exit_code
    if job.verdict is not None:
        return EXIT_OUT_OF_STEP
    if job.failure is not None:
        real = job.exit_codes.get(job.failure.rank, 0)
        ours = {128 + signal.SIGTERM, 128 + signal.SIGKILL}  # it hung on its way out, and we ended it
        return real if real and (job.failure.signal or real not in ours) else job.failure.exit_code or 1
    if job.lost is not None:
        return job.lost.exit_code
    return None


def _first_failure(job: Supervisor, plan: Plan) -> dict[str, Any] | None:
    if job.error is not None:
        return {"host": plan.host, "rank": None, "message": str(job.error)}
    if job.verdict is not None:
        verdict = job.verdict.verdict
        rank = verdict.ranks[0] if len(verdict.ranks) == 1 else None
        host = plan.host if rank is None else plan.node_of(rank).name
        return {"host": host, "rank": rank, "message": f"ranks out of step: {verdict.reason}"}
    if job.failure is not None:
        return job.failure.as_json(plan.node_of(job.failure.rank).name)
    if job.lost is not None:
        return {"host": job.lost.host, "rank": None, "message": job.lost.why}
    return None


class _Reporter(Listener):
    """Tells the user what happens, at the moment it does."""

    def __init__(self, run: Conduct) -> None:
        self._run = run
        self.teller = Teller(colour=wants_colour(os.environ, is_terminal=run.output.stderr.is_terminal))
        self._killed_before = out_of_memory_kills()

    def failed(self, job: Supervisor, event: Event, others: int) -> None:
        output = self._run.output
        log = output.logs[event.rank]
        detail: list[str] = []
        if not output.shows(event.rank):  # else it is on the screen already
            detail = details(event) if event.type else log.tail(LOG_LINES)
        here = len(self._run.plan.nodes) == 1
        memory = self._memory(job.pids.get(event.rank, 0)) if event.signal == signal.SIGKILL and here else ""
        host = self._run.plan.node_of(event.rank).name
        output.say(self.teller.failure(event, host, detail=detail, log=log.path, others=others, memory=memory))

    def lost(self, _: Supervisor, lost: Lost, others: int) -> None:
        self._run.output.say(self.teller.lost(lost.why, others=others))

    def _memory(self, pid: int) -> str:
        """What is known, without privileges, of the out-of-memory killer."""
        if kernel_says_out_of_memory(pid):
            return "by the out-of-memory killer, says the kernel's log: this machine ran out of memory"
        before, after = self._killed_before, out_of_memory_kills()
        if before is not None and after is not None and after > before:
            return "by the out-of-memory killer: the control group of this job reached its memory limit"
        return ""

    def asked_to_end(self, job: Supervisor, number: int, *, again: bool) -> None:
        plan = self._run.plan
        self._run.output.say(
            self.teller.asked(number, plan.world_size, plan.grace, again=again, started=bool(job.pids))
        )


class _Facts:
    """Versions and the state of the code, gathered while the fork server imports torch."""

    def __init__(self, target: Target, folder: Path, record: RunRecord) -> None:
        self._folder = folder
        self._record = record
        self._place = Path.cwd() if target.kind == "module" else Path(target.name).resolve().parent
        self._versions: dict[str, str | None] = {}
        self._git: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()
        self._taken = False

    def _gather(self) -> None:
        self._versions = {"python": sys.version.split()[0], "torch": _version("torch"), "instep": __version__}
        facts = git_facts(self._place, exclude=self._folder.parent)
        if facts is None:
            return
        self._git = facts.as_json()
        if facts.patch:
            with suppress(OSError):  # a full disk will be said by the next who writes
                write_whole(self._folder / "dirty.patch", facts.patch)

    def arrived(self) -> bool:
        """Whether they are all there; then they stand in run.json."""
        if self._thread.is_alive():
            return False
        if not self._taken:
            self._taken = True
            self._record.versions, self._record.git = self._versions, self._git
            with suppress(OSError):
                self._record.write(self._folder)
        return True

    def wait(self) -> None:
        """At the end of the run: what has not come by now is left out."""
        self._thread.join(_FACTS_S)
        self._record.versions, self._record.git = self._versions, self._git


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
