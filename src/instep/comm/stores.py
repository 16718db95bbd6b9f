"""The key-value store through which the ranks find each other: over TCP, or in a file that all see.

A TCP store is made once and kept as long as the process lives, so that a process can leave and join again without a
moment in which the port is shut or still belongs to the former life.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from instep.comm import store_files
from instep.comm.logs import get_logger
from instep.errors import JoinError
from instep.world import ports
from instep.world.meeting import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from instep.world import World

_RESOLVE_FOR = 10.0  # seconds: a name that is unknown so long is wrong, not late
_kept: dict[str, tuple[Store, int]] = {}


def open_store(world: World, timeout: float) -> tuple[Store, bool]:
    """(the store of this job for this join, whether this process holds it for the others).

    Args:
        world: who this process is, and where the ranks meet.
        timeout: how long to look for the main rank, in seconds.

    Raises:
        JoinError: the port is taken, the main rank's machine cannot be found or reached, or the file is a leftover.

    """
    from torch.distributed import PrefixStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if world.init_method.startswith("file://"):
        return PrefixStore(f"instep/{attempt}", store_files.make(world)), False
    place = f"{world.master_addr}:{world.master_port}"
    store, joins = _kept.get(place) or (_make(world, timeout), 0)
    _kept[place] = store, joins + 1
    return PrefixStore(f"instep/{attempt}/{joins}", store), _serves(world)


def _serves(world: World) -> bool:
    return world.is_main and not agent_serves(os.environ, world)


def agent_serves(env: Mapping[str, str], world: World) -> bool:
    """Whether torchrun's agent already listens where the ranks meet: then no rank does (rendezvous.py of torch)."""
    at_agents = (env.get("MASTER_ADDR"), env.get("MASTER_PORT")) == (world.master_addr, str(world.master_port))
    return at_agents and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _make(world: World, timeout: float) -> Store:
    return _serve(world) if _serves(world) else _connect(world, timeout)


def _serve(world: World) -> Store:
    from torch.distributed import TCPStore

    try:
        # multi_tenant: a plain init_process_group("env://") in the same process may use the same port.
        return TCPStore(
            world.master_addr,
            world.master_port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=60),
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise ports.taken(world.master_port, world.why("master_port")) from None
        raise JoinError(
            f"The main rank cannot meet the others at {world.master_addr}:{world.master_port}.",
            evidence=[str(error).splitlines()[0], world.why("master_addr"), world.why("master_port")],
            cure="The main rank has to run on the machine that MASTER_ADDR names; that name has to resolve there, and "
            "the port has to be one that this user may open.",
        ) from None


def _connect(world: World, timeout: float) -> Store:
    _refuse_own_name(world)
    _knock(world, timeout)
    found: list[Store | RuntimeError] = []
    # torch has no limit for a peer that accepts the connection and says nothing: such a thread is left behind.
    thread = threading.Thread(target=_greet, args=(world, min(timeout, 30.0), found), daemon=True)
    thread.start()
    thread.join(min(timeout, 30.0) + 1.0)
    answer = found[0] if found else RuntimeError("it accepts the connection and does not answer")
    if isinstance(answer, RuntimeError):
        raise JoinError(
            f"Somebody listens at {world.master_addr}:{world.master_port}, but it is not the main rank of a job.",
            evidence=[str(answer).splitlines()[0], world.why("master_addr"), world.why("master_port")],
            cure="Another program has that port: choose another one, the same on all ranks:  export MASTER_PORT=29511",
        )
    return answer


def _greet(world: World, timeout: float, found: list[Store | RuntimeError]) -> None:
    from torch.distributed import TCPStore

    try:
        found.append(
            TCPStore(
                world.master_addr,
                world.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
            )
        )
    except RuntimeError as error:
        found.append(error)


def _refuse_own_name(world: World) -> None:
    """Refuse a master whose name leads a rank of another node to that node itself (/etc/hosts: 127.0.1.1 NAME)."""
    if world.node_rank in (None, 0) or is_loopback(world.master_addr):
        return
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(world.master_addr, None, type=socket.SOCK_STREAM)}
    except OSError:
        return  # _knock says so
    if found and all(is_loopback(address) for address in found):
        raise JoinError(
            f"On {socket.gethostname()}, {world.master_addr} means this machine itself, but rank 0 runs elsewhere.",
            evidence=[f"{world.master_addr} resolves to {', '.join(sorted(found))}", world.why("master_addr")],
            cure="Mend /etc/hosts there, or meet at an address:  export MASTER_ADDR=10.0.0.1",
        )


def _knock(world: World, timeout: float) -> None:
    """Wait until somebody listens at the master's address: torch would wait too, but in silence or with warnings."""
    start = time.monotonic()
    pause, told, last = 0.005, False, ""
    while True:
        waited = time.monotonic() - start
        try:
            with socket.create_connection((world.master_addr, world.master_port), timeout=max(0.1, min(5.0, timeout))):
                return
        except socket.gaierror as error:
            last = f"{world.master_addr} does not resolve on {socket.gethostname()}: {error.strerror}"
            if waited > min(timeout, _RESOLVE_FOR):
                raise _unreachable(world, waited, last) from None
        except OSError as error:
            last = f"{type(error).__name__}: {error.strerror or error}"
        waited = time.monotonic() - start
        if waited >= timeout:
            raise _unreachable(world, waited, last)
        if waited > 10.0 and not told:
            told = True
            get_logger("instep").warning(
                "rank %d waits for the main rank at %s:%d (%s)", world.rank, world.master_addr, world.master_port, last
            )
        time.sleep(min(pause, timeout - waited))
        pause = min(pause * 1.5, 0.5)


def _unreachable(world: World, waited: float, last: str) -> JoinError:
    refused = "Refused" in last
    return JoinError(
        f"Rank {world.rank} on {socket.gethostname()} did not find the main rank at "
        f"{world.master_addr}:{world.master_port} within {waited:.0f} s.",
        evidence=[last, f"address: {world.why('master_addr')}", f"port: {world.why('master_port')}"],
        cure="That machine answers, but rank 0 does not listen there: has it started, on that machine, with that port? "
        "Look at its output."
        if refused
        else "Is this the right machine, and may the port be reached from here (firewall)? Try from this machine:\n"
        f"getent hosts {world.master_addr}; nc -vz {world.master_addr} {world.master_port}",
    )
