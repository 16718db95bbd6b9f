"""Carry out a plan on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep import __version__
from instep.launch import kin
from instep.launch.failure import Event, details, signal_name
from instep.launch.machine import kernel_says_out_of_memory, out_of_memory_kills
from instep.launch.output import Output, cannot_write
from instep.launch.plan import MASTER_ADDR, Plan
from instep.launch.port import reserve
from instep.launch.server import ForkServer, raise_file_limit
from instep.launch.signals import Signals
from instep.launch.supervisor import Listener, Supervisor
from instep.launch.telling import LOG_LINES, Teller, wants_colour
from instep.runs import EXIT_OUT_OF_STEP, RunRecord, create_folder, default_name, git_facts, judge, now
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from instep.launch.guarding import Guarding
    from instep.launch.target import Target

_FACTS_S = 10.0  # how long the end of a run waits for a slow git


def run_here(plan: Plan, *, runs: Path, name: str | None, command: list[str], stdout: int = 1) -> dict[str, Any]:
    """Start the ranks, watch them to their end, and keep the record.

    Args:
        plan: what to do.
        runs: the folder of all runs.
        name: of this one; None for the program's name and the time.
        command: what was typed, for the record.
        stdout: the descriptor that takes what ranks print to their standard output.

    Returns:
        what stands in ``run.json``, and the "folder".

    Raises:
        RunError: the run could not be started, or its folder could not be written; nothing is left running.

    """
    _open_standard_streams()
    with Signals() as signals:
        begin = time.monotonic()
        folder = create_folder(runs, name, default_name(plan.target.stem, datetime.now()))  # noqa: DTZ005  # local
        with closing(reserve(plan.ports)) as held, ExitStack() as at_end:
            port = held.getsockname()[1]
            record = _new_record(plan, folder, command, port)
            most_files = raise_file_limit(plan.world_size)
            try:
                record.write(folder)
                output = Output(folder, plan.world_size, plan.show, stdout=stdout)
            except OSError as error:
                raise cannot_write(folder / "run.json", error) from error
            kin.adopt_orphans()
            reporter = _Reporter(plan, output, folder)
            guarding = _guarding(plan, folder, reporter)
            if guarding:
                at_end.callback(guarding.close)
            server = ForkServer(
                plan.target,
                world_size=plan.world_size,
                port=port,
                marker=record.job,
                folder=folder,
                outputs=output.ends,
                most_files=most_files,
                environ=_environ(plan, folder, record.job, guarding),
            )
            output.close_ends()
            facts = _Facts(plan.target, folder, record)
            output.say(reporter.teller.start(plan, port, folder))
            job = Supervisor(
                server, output, signals, reporter, world_size=plan.world_size, grace=plan.grace, guarding=guarding
            )
            job.add_chore(facts.arrived)
            job.watch()
            if guarding and job.is_calm and not any(job.exit_codes.values()):
                guarding.last_look(job.exit_codes)
        facts.wait()
        return _conclude(job, record, folder, reporter, time.monotonic() - begin)


def _guarding(plan: Plan, folder: Path, reporter: _Reporter) -> Guarding | None:
    if plan.guard == "off" or plan.world_size == 1:
        return None
    try:
        from instep.launch.guarding import Guarding

        return Guarding(plan, folder, reporter.output, reporter.teller)
    except OSError as error:
        reporter.output.say([reporter.teller.note(f"the ranks are not watched: no folder for their records ({error})")])
        return None


def _environ(plan: Plan, folder: Path, job: str, guarding: Guarding | None) -> dict[str, str]:
    """What the fork server is started with, and the ranks after it."""
    environ = {**os.environ, **plan.variables, "INSTEP_RUN": str(folder), "INSTEP_JOB": job}
    environ.pop("INSTEP_GUARD", None)  # of a run that this one is part of
    return environ | ({"INSTEP_GUARD": str(guarding.folder)} if guarding else {})


def _open_standard_streams() -> None:
    """Where the caller has closed one (``<&-``), let nothing of ours take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _new_record(plan: Plan, folder: Path, command: list[str], port: int) -> RunRecord:
    return RunRecord(
        name=folder.name,
        command=command,
        script=plan.target.name,
        arguments=list(plan.target.arguments),
        cwd=str(Path.cwd()),
        hosts=[plan.host],
        world_size=plan.world_size,
        device=plan.device,
        threads=plan.threads,
        master=f"{MASTER_ADDR}:{port}",
        job=f"{folder.name}-{secrets.token_hex(6)}",
        pid=os.getpid(),
    )


def _conclude(job: Supervisor, record: RunRecord, folder: Path, reporter: _Reporter, seconds: float) -> dict[str, Any]:
    """Write the end into run.json and onto the screen."""
    record.end, record.seconds = now(), round(seconds, 3)
    record.exit_codes = {str(rank): job.exit_codes[rank] for rank in sorted(job.exit_codes)}
    first = _failure_code(job)
    record.outcome, record.exit_code = judge(job.exit_codes.values(), first_failure=first, signal=job.signal or None)
    record.first_failure = _first_failure(job, reporter)
    error = job.error
    try:
        record.write(folder)
    except OSError as failed:
        error = error or cannot_write(folder / "run.json", failed)
    if error is not None:
        raise error
    lines = reporter.teller.leftovers(job.leftovers)
    if job.server_status is not None and record.first_failure:
        lines = [f"✗ {record.first_failure['message']}"]
    lines += reporter.teller.end(record.outcome, record.exit_code, seconds, folder)
    reporter.output.say(lines)
    found = {"desync": job.verdict.as_json()} if job.verdict else {}
    return {**record.as_json(), "folder": str(folder), **found}


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
    if job.server_status is not None and not job.signal:
        return 128 - job.server_status if job.server_status < 0 else job.server_status or 1
    return None


def _first_failure(job: Supervisor, reporter: _Reporter) -> dict[str, Any] | None:
    if job.error is not None:
        return {"host": reporter.plan.host, "rank": None, "message": str(job.error)}
    if job.verdict is not None:
        verdict = job.verdict.verdict
        rank = verdict.ranks[0] if len(verdict.ranks) == 1 else None
        return {"host": reporter.plan.host, "rank": rank, "message": f"ranks out of step: {verdict.reason}"}
    if job.failure is not None:
        return job.failure.as_json(reporter.plan.host)
    if job.server_status is not None and not job.signal:
        status = job.server_status
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"left with exit code {status}"
        return {
            "host": reporter.plan.host,
            "rank": None,
            "message": f"the fork server on {reporter.plan.host}, the parent of all ranks, {how}",
        }
    return None


class _Reporter(Listener):
    """Tells the user what happens, at the moment it does."""

    def __init__(self, plan: Plan, output: Output, folder: Path) -> None:
        self.plan = plan
        self.output = output
        self.teller = Teller(colour=wants_colour(os.environ, is_terminal=output.stderr.is_terminal))
        self._folder = folder
        self._killed_before = out_of_memory_kills()

    def failed(self, job: Supervisor, event: Event, others: int) -> None:
        log = self.output.logs[event.rank]
        detail: list[str] = []
        if not self.output.shows(event.rank):  # else it is on the screen already
            detail = details(event) if event.type else log.tail(LOG_LINES)
        memory = self._memory(job.pids.get(event.rank, 0)) if event.signal == signal.SIGKILL else ""
        self.output.say(
            self.teller.failure(event, self.plan.host, detail=detail, log=log.path, others=others, memory=memory)
        )

    def _memory(self, pid: int) -> str:
        """What is known, without privileges, of the out-of-memory killer."""
        if kernel_says_out_of_memory(pid):
            return "by the out-of-memory killer, says the kernel's log: this machine ran out of memory"
        before, after = self._killed_before, out_of_memory_kills()
        if before is not None and after is not None and after > before:
            return "by the out-of-memory killer: the control group of this job reached its memory limit"
        return ""

    def asked_to_end(self, job: Supervisor, number: int, *, again: bool) -> None:
        self.output.say(
            self.teller.asked(number, self.plan.world_size, self.plan.grace, again=again, started=bool(job.pids))
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
