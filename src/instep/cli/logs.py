"""``instep logs``: what the ranks of a run wrote, and what they write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from instep.errors import RunError


def logs_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of a run, or its folder.")],
    rank: Annotated[str, typer.Option(metavar="N|all", help="Whose; all: each line begins with its rank.")] = "0",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.", show_default=False)
    ] = False,
    tail: Annotated[
        str | None, typer.Option(metavar="N", help="Only the last N lines of each rank.", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are kept.")] = Path("runs"),
) -> None:
    """Print what a rank of RUN has written to its standard output and error.

    The main rank's without --rank. With --rank all and --follow lines come as they are written; without --follow one
    rank after the other.
    """
    from instep.launch.registry.known import live_folders
    from instep.launch.registry.reading import Reader, print_logs
    from instep.runs.finding import find_run, read_record

    folder = find_run(run, runs, "logs", live_folders)
    record = read_record(folder)
    ranks = _ranks(rank, int(record["world_size"]))
    lines = None if tail is None else _count(tail)
    readers = [Reader(folder / "log" / f"rank-{one}.txt", one, prefixed=rank == "all") for one in ranks]
    try:
        code = print_logs(folder, readers, tail=lines, follow=follow)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `| head` has seen enough
        code = 0
    sys.stdout = None  # what Python would flush at its end has nobody to read it
    raise typer.Exit(code)


def _ranks(said: str, world_size: int) -> list[int]:
    if said == "all":
        return list(range(world_size))
    if not (said.isascii() and said.isdigit() and int(said) < world_size):
        last = f"0 to {world_size - 1}, or all" if world_size > 1 else "0"
        raise RunError(f"--rank {said} is no rank of this run", cure=f"give {last}")
    return [int(said)]


def _count(said: str) -> int:
    if not (said.isascii() and said.isdigit()):
        raise RunError(f"--tail {said} is no number of lines", cure="give 0 or more, such as --tail 20")
    return int(said)
