"""``instep ps``: one's own runs that go on, here and on other machines."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from instep.errors import InstepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.launch.registry.known import Found, Run

_HEAD = ("RUN", "STATE", "RANKS", "HOSTS", "SINCE", "VIA", "PID/JOB", "FOLDER")
_MOST_HOSTS = 3  # named in the table; --json names all


def ps_command(  # noqa: PLR0917  # typer reads the signature
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="LIST", help="Look on these machines, too: n1,n2 or n[1-4].")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="The machines of a hostfile.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option("--inventory", metavar="FILE", help="The machines of an inventory.")
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are kept.")] = Path("runs"),
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long each machine may take to answer.")] = 10.0,
    python: Annotated[str, typer.Option(metavar="PATH", help="The interpreter there.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> None:
    """List your runs that go on: on this machine, in DIR, in Slurm's queue and, where you name machines, on those.

    Exit code 1 where a machine did not answer; what was found is printed all the same.
    """
    from instep.cli.hosts import check_seconds, host_list, others
    from instep.launch.agents.ssh import Way
    from instep.launch.registry import known

    try:
        check_seconds("--timeout", timeout, least=0.1)
        named = host_list(hosts, hostfile, inventory)
        way = Way(named.ssh_config if named else None, python or sys.executable)
        asked = others(host.name for host in named.hosts) if named else []
        found = known.find(asked, way, runs, timeout)
    except InstepError as error:
        if as_json:
            said = {"what": error.what, "evidence": list(error.evidence), "cure": error.cure}
            print(json.dumps({"error": said}, indent=2), flush=True)
        raise
    _print(found, runs, as_json=as_json)
    raise typer.Exit(1 if found.silent else 0)


def _print(found: Found, runs: Path, *, as_json: bool) -> None:
    if as_json:
        values = {"runs": [run.as_json() for run in found.runs], "unreachable": found.silent}
        print(json.dumps(values, indent=2), flush=True)
        return
    if found.runs:
        print("\n".join(table(found.runs)), flush=True)
    else:
        print(f"no run of yours goes on here, and none in {runs} is without an end", file=sys.stderr, flush=True)
    for host, why in found.silent.items():
        print(f"! {host} did not answer: {why}", file=sys.stderr, flush=True)


def table(runs: Sequence[Run]) -> list[str]:
    """One line for each run, below a head."""
    rows = [_HEAD, *(_row(run) for run in runs)]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]


def _row(run: Run) -> tuple[str, ...]:
    pid = f"pid {run.pid}" + (f" on {run.launcher_host}" if run.launcher_host else "") if run.pid else "-"
    cells = (
        run.name,
        run.state,
        str(run.ranks),
        hosts_words(run.hosts),
        _when(run.start),
        run.via or "-",
        f"job {run.slurm_job}" if run.slurm_job else pid,
        near(run.folder) or "-",
    )
    return tuple("".join(one if one.isprintable() else "?" for one in cell) for cell in cells)


def hosts_words(hosts: Sequence[str]) -> str:
    """Some of them, and how many more there are."""
    if len(hosts) <= _MOST_HOSTS:
        return ",".join(hosts) or "-"
    return f"{','.join(hosts[: _MOST_HOSTS - 1])} and {len(hosts) - _MOST_HOSTS + 1} more"


def _when(start: str) -> str:
    try:
        return datetime.fromisoformat(start).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return "-"


def near(folder: str) -> str:
    """Relative to the working folder where it lies below."""
    short = os.path.relpath(folder) if folder else ""
    return folder if short.startswith("..") else short
