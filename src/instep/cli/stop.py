"""``instep stop``: end one run on all its machines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instep.launch.registry.stopping import Goal, Report
    from instep.world.hosts import HostList

_MOST_NAMED = 5


def stop_command(  # noqa: PLR0917  # typer reads the signature
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of a run, or its folder.")],
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to leave after SIGTERM, before SIGKILL.")
    ] = 30.0,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="LIST", help="Its machines, where run.json does not say.")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option("--hostfile", metavar="FILE", help="The same, a hostfile.")] = None,
    inventory: Annotated[
        Path | None, typer.Option("--inventory", metavar="FILE", help="The same, with its ssh configuration.")
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are kept.")] = Path("runs"),
    python: Annotated[str, typer.Option(metavar="PATH", help="The interpreter there.", show_default=False)] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; end nothing.", show_default=False)
    ] = False,
) -> None:
    """End RUN on all its machines, and wait until nothing of it is left. Other runs are not touched.

    Exit code 0 when nothing is left, also of a run that had ended before; 1 where that is not known.
    """
    from instep.cli.hosts import check_seconds, host_list
    from instep.launch.registry import stopping

    check_seconds("--grace", grace)
    named = host_list(hosts, hostfile, inventory)
    goal = _goal(run, runs, grace, named, python or sys.executable)
    if dry_run:
        print("\n".join([f"{goal.name}: would be ended by", *(f"  {line}" for line in stopping.preview(goal))]))
        return
    begin = time.monotonic()
    report = stopping.stop(goal, _say)
    if report.is_clear and stopping.write_end(goal):
        _say("… its launcher wrote no end: run.json says interrupted now")
    for line in _told(goal, report, time.monotonic() - begin):
        _say(line)
    raise typer.Exit(0 if report.is_clear else 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _goal(run: str, runs: Path, grace: float, named: HostList | None, python: str) -> Goal:
    from instep.cli.hosts import others
    from instep.launch.agents.ssh import Way
    from instep.launch.registry.known import live_folders
    from instep.launch.registry.stopping import Goal
    from instep.runs import launcher
    from instep.runs.finding import find_run, read_record

    folder: Path | None
    try:
        folder = find_run(run, runs, "stop", live_folders)
    except RunError:
        job = _marker(run)  # of a run whose folder was removed
        if job is None:
            raise
        folder = record = None
    else:
        record = read_record(folder)
        job = record["job"]
    if record is not None and record.get("via") in {None, "local"} and launcher.is_here(record):
        hosts = []
    elif record is not None:
        hosts = others(map(str, record["hosts"]))
        if record.get("slurm_job"):
            hosts = []  # Slurm's affair: its machines may let nobody in
    else:
        hosts = others(host.name for host in named.hosts) if named else []
    way = Way(named.ssh_config if named else _config(record), python)
    return Goal(record["name"] if record else run, job, folder, record, tuple(hosts), way, grace)


def _marker(run: str) -> str | None:
    """The marker of a run of which only processes are left on this machine."""
    from instep.launch.registry.sightings import look

    for one in look():
        if run in {one.job, one.job.rpartition("-")[0]}:
            return one.job
    return None


def _config(record: Mapping[str, Any] | None) -> Path | None:
    found = record.get("ssh_config") if record else None
    return Path(found) if isinstance(found, str) else None


def _told(goal: Goal, report: Report, seconds: float) -> list[str]:
    lines = []
    for host, names in report.ended.items():
        more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        lines.append(f"  ended on {host}: {', '.join(names[:_MOST_NAMED])}{more}")
    for host, names in report.left.items():
        lines.append(f"✗ still there on {host}, even after SIGKILL: {', '.join(names[:_MOST_NAMED])}")
    for host, why in report.silent.items():
        lines.append(f"✗ {host} did not answer, so what is left there is not known: {why}")
    if not report.is_clear:
        return lines
    did = report.launcher or report.ended or goal.is_running
    where = f" on {len(goal.hosts) + 1} machines" if goal.hosts else ""
    if not did:
        outcome = goal.record["outcome"] if goal.record else "ended"
        return [f"{goal.name} has ended already: {outcome}; nothing of it is left{where}"]
    return [*lines, f"■ nothing is left of {goal.name}{where} · {seconds:.1f} s"]
