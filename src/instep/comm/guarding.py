"""The guard of a job that instep did not start: a recorder in each rank, and one process on each node that watches."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from instep.comm import interfaces
from instep.comm.logs import get_logger
from instep.comm.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from instep.comm.rollcall import Report
    from instep.guard.recorder import Recorder
    from instep.world import World

# It forks at once, and the first half ends: what is left is no child of the user's program, which may count them.
_START = """import os, sys
if os.fork(): os._exit(0)
sys.path[0] = sys.argv[1]
from instep.guard import sidecar
sidecar.main(sys.argv[2])
"""
_STORE_KEY = "guard/meet"
_MEET_S = 20.0  # the other nodes wait no longer for the address of node 0's

_recorder: list[Recorder] = []  # this rank's, if init() has started it


def begin(world: World, reports: Sequence[Report], store: Store, timeout: float) -> None:
    """Have this rank watched, if any rank wants that. Whatever ails the guard, the job goes on.

    Args:
        world: who this rank is.
        reports: those of all ranks.
        store: the store of this join.
        timeout: of the join, in seconds.

    """
    _recorder.clear()
    if len(reports) == 1 or not any(one.guard for one in reports) or os.environ.get("INSTEP_GUARD"):
        return
    try:
        _begin(world, reports, store, min(timeout, _MEET_S))
    except Exception as error:  # noqa: BLE001
        get_logger("instep").warning("the guard does not watch rank %d: %r", world.rank, error)


def leave(error: BaseException | None = None) -> None:
    """Say that this rank leaves the world: properly, or by an error. The first word counts."""
    if _recorder:
        _recorder.pop().leave("failed" if error else "finished", error)


def _begin(world: World, reports: Sequence[Report], store: Store, timeout: float) -> None:
    from instep.guard import folders, recorder

    token = reports[0].token
    mine = reports[world.rank]
    here = [one for one in reports if one.machine == mine.machine]
    machines = list(dict.fromkeys(one.machine for one in reports))
    folder = folders.shared_folder(hashlib.sha256(token.encode()).hexdigest()[:16])
    _recorder.append(recorder.start(folder, world.rank))
    if here[0].rank != world.rank:
        return
    told = {
        "world_size": len(reports),
        "host": mine.host,
        "pids": {str(one.rank): one.pid for one in here},
        "others": [
            {"host": one.host, "ranks": [each.rank for each in reports if each.machine == machine]}
            for machine in machines[1:]
            for one in [next(each for each in reports if each.machine == machine)]
        ],
        "hub": mine.machine == machines[0],
        "token": token,
        "script": _script(),
        "cwd": str(Path.cwd()),
        "meet": [],
        "listens": None,
    }
    listener = None
    if len(machines) > 1:
        if told["hub"]:
            listener = _listen()
            told["listens"] = listener.fileno()
            found = [one for ones in interfaces.here().values() for one in ones]
            store.set(_STORE_KEY, json.dumps([[mine.host, *found], listener.getsockname()[1]]))
        elif wait_for(store, [_STORE_KEY], timeout, lambda: "waiting for the guard of the main rank's node"):
            names, port = json.loads(store.get(_STORE_KEY))
            told["meet"] = [[name, port] for name in dict.fromkeys([world.master_addr, *names]) if name]
    try:
        _start_sidecar(folder, told, listener)
    finally:
        if listener is not None:
            listener.close()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        except OSError:
            pass
    return socket.create_server(("", 0), backlog=128)


def _script() -> str:
    name = sys.argv[0] if sys.argv else ""
    return Path(name).stem if name not in {"", "-c", "-m"} else "run"


def _start_sidecar(folder: Path, told: dict[str, object], listener: socket.socket | None) -> None:
    """Start the process that watches this node. It leaves this process tree, and ends when its ranks have gone."""
    plan = folder / "sidecar.json"
    descriptor = os.open(plan, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:  # noqa: PTH123  # a descriptor
        json.dump(told, file)
    home = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", _START, home, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if listener is None else (listener.fileno(),),
        env={name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"},
    ) as process:
        deadline = time.monotonic() + _MEET_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.returncode != 0:
            process.kill()
            raise OSError(f"its process did not start: {process.returncode}")
