"""``instep world``: who is this process, and what says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from instep.world import World


def world_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> None:
    """Tell who this process is, as a script would find it, and which variable or rule says so.

    Start it the way you start the script:  srun instep world  |  mpirun -np 2 instep world  |
    torchrun --nproc-per-node 2 --no-python instep world  |  instep run -m instep world
    """
    from instep.world import detect

    world = detect()
    if as_json:
        print(json.dumps(world.as_json()), flush=True)
    else:
        # One write, so that the tables of several ranks do not mix.
        print("\n".join(_table(world)), flush=True)


def _table(world: World) -> list[str]:
    from instep.world import FIELDS

    rows = [(name, _shown(getattr(world, name)), world.why(name)) for name in FIELDS]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    said = {"alone": "alone", "environment": "as the environment says"}
    lines = [f"rank {world.rank} of {world.world_size}, {said.get(world.launcher, f'started by {world.launcher}')}"]
    lines += [f"  {name:<{wide[0]}}  {value:<{wide[1]}}  {why}".rstrip() for name, value, why in rows]
    return lines + _port_note(world)


def _shown(value: object) -> str:
    return "not told" if value is None else "-" if value == "" else str(value)


def _port_note(world: World) -> list[str]:
    """Who holds the port that the main rank is going to open, if somebody does."""
    from instep.world import ports

    if not world.is_main or "derived" not in world.why("master_port") or ports.is_free(world.master_port):
        return []
    return [f"  ! port {world.master_port} is in use here, by {ports.holder(world.master_port)}"]
