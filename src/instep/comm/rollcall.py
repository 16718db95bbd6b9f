"""The ranks report to each other before they join, so that whoever is missing can be named."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instep.comm.waiting import store_gone, wait_for
from instep.errors import JoinError, StepError
from instep.world import Evidence

if TYPE_CHECKING:
    from torch.distributed import Store

    from instep.world import World


@dataclass(frozen=True)
class Report:
    """What a rank says of itself.

    Attributes:
        rank: its number.
        world_size: how many ranks it expects.
        host: its machine's name.
        machine: what tells its machine from others of the same name.
        pid: its process.
        address: the address from which it reaches the main rank; empty where there is no network between.
        launcher: what says that it is that rank.
        guard: whether it wants to be watched.
        token: a secret that only these ranks share: the main rank's counts.

    """

    rank: int
    world_size: int
    host: str
    machine: str
    pid: int
    address: str
    launcher: str
    guard: bool = False
    token: str = ""

    def who(self) -> str:
        """The rank, its process and machine, for an error."""
        return f"rank {self.rank} of {self.world_size} (pid {self.pid} on {self.host}, said {self.launcher})"


def report(world: World, address: str, *, guard: bool = False) -> Report:
    """What this rank says of itself."""
    host = socket.gethostname()
    return Report(
        rank=world.rank,
        world_size=world.world_size,
        host=host,
        machine=f"{host} {_boot_id()}",
        pid=os.getpid(),
        address=address,
        launcher=world.launcher,
        guard=guard,
        token=secrets.token_hex(16),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def call(store: Store, mine: Report, timeout: float) -> list[Report]:
    """The reports of all ranks, in rank order.

    Args:
        store: the store of this join.
        mine: this rank's report.
        timeout: how long to wait for the others, in seconds.

    Raises:
        JoinError: some did not come in time (they are named), two say that they are the same rank, or they do not
            agree how many they are.

    """
    try:
        try:
            reports = _exchange(store, mine, timeout)
            _check(reports)
        except JoinError as error:
            _tell_others(store, mine, error)
            raise
    except (RuntimeError, StepError) as error:
        gone = error if isinstance(error, StepError) else store_gone(error)
        raise JoinError(gone.what, evidence=gone.evidence, cure=gone.cure) from None
    return reports


def _tell_others(store: Store, mine: Report, error: JoinError) -> None:
    """Let the others fail with the same words; the main rank stays a moment, for its store ends with it."""
    if not store.check(["trouble"]):
        store.set("trouble", json.dumps([error.what, error.evidence, error.cure]))
    store.set(f"heard/{mine.rank}", "1")
    if mine.rank == 0:
        here = [f"heard/{entry.rank}" for entry in _present(store, mine) if entry is not None]
        wait_for(store, here, 2.0, str)


def _exchange(store: Store, mine: Report, timeout: float) -> list[Report]:
    text = json.dumps(asdict(mine))
    if store.add(f"claim/{mine.rank}", 1) > 1:
        wait_for(store, [_came(mine.rank)], 2.0, str)
        other = _read(store, mine.rank)
        raise JoinError(
            f"Two processes say that they are rank {mine.rank}.",
            evidence=[entry.who() for entry in (other, mine) if entry is not None],
            cure="Let one launcher give the ranks: a variable that was expanded on the submitting machine is the same "
            "everywhere,\nand two jobs at one address and port meet (export another MASTER_PORT for one of them).",
        )
    store.set(_came(mine.rank), text)
    everyone = [_came(rank) for rank in range(mine.world_size)]
    if wait_for(store, everyone, timeout, lambda: _waiting(store, mine), stop="trouble"):
        return [Report(**json.loads(one)) for one in store.multi_get(everyone)]
    if store.check(["trouble"]):
        what, evidence, cure = json.loads(store.get("trouble"))
        raise JoinError(what, evidence=evidence, cure=cure)
    raise _incomplete(store, mine, timeout)


def _came(rank: int) -> str:
    return f"came/{rank}"


def _read(store: Store, rank: int) -> Report | None:
    return Report(**json.loads(store.get(_came(rank)))) if store.check([_came(rank)]) else None


def _present(store: Store, mine: Report) -> list[Report | None]:
    return [_read(store, rank) for rank in range(mine.world_size)]


def _waiting(store: Store, mine: Report) -> str:
    missing = [rank for rank, entry in enumerate(_present(store, mine)) if entry is None]
    return f"waiting for rank{_list(missing)} of {mine.world_size} to join"


def _list(ranks: list[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:20]) + (", ..." if len(ranks) > 20 else "")
    return f" {text}" if len(ranks) == 1 else f"s {text}"


def _incomplete(store: Store, mine: Report, timeout: float) -> JoinError:
    present = _present(store, mine)
    missing = [rank for rank, entry in enumerate(present) if entry is None]
    here = [entry for entry in present if entry is not None]
    by_host: dict[str, list[int]] = {}
    for entry in here:
        by_host.setdefault(entry.host, []).append(entry.rank)
    evidence = [f"came: rank{_list(ranks)} on {host}" for host, ranks in by_host.items()]
    sizes = {entry.world_size for entry in here}
    if len(sizes) > 1:
        evidence += [f"do not agree: {entry.who()}" for entry in here[:8]]
    return JoinError(
        f"Rank{_list(missing)} of {mine.world_size} did not come within {timeout:g} s.",
        evidence=[*evidence, f"did not come: rank{_list(missing)}"],
        cure="Look at the output of the missing ranks: were they started, did they fail before init(), do they meet at "
        "another address or port?\nAsk each:  instep world     If they are only slow:  instep.init(timeout=...)",
    )


def _check(reports: list[Report]) -> None:
    first = reports[0]
    for entry in reports:
        if entry.world_size != first.world_size:
            raise JoinError(
                "The ranks do not agree how many they are.",
                evidence=[first.who(), entry.who()],
                cure="Start all ranks by one launcher with one number of processes.",
            )


def check_devices(store: Store, reports: list[Report], rank: int, device: str, timeout: float) -> None:
    """Refuse two ranks on one GPU, which NCCL would call 'Duplicate GPU detected' or wait for.

    Args:
        store: the store of this join.
        reports: those of all ranks.
        rank: this rank.
        device: a name that no other device of this machine has; empty on the CPU, where nothing is compared.
        timeout: how long to wait for the others, in seconds.

    Raises:
        JoinError: another rank of this machine has the same one.

    """
    if not device:
        return
    store.set(f"device/{rank}", device)
    here = [entry for entry in reports if entry.machine == reports[rank].machine and entry.rank != rank]
    wait_for(store, [f"device/{entry.rank}" for entry in here], timeout, lambda: "waiting for the other ranks' GPUs")
    for entry in here:
        if store.check([f"device/{entry.rank}"]) and bytes(store.get(f"device/{entry.rank}")).decode() == device:
            raise JoinError(
                "Two ranks have taken the same GPU: there are more ranks than GPUs on a node.",
                evidence=[f"{one.who()}: {device}" for one in (reports[rank], entry)],
                cure="Start at most as many ranks on a node as it has GPUs, or use the CPU: instep.init(device='cpu').",
            )


def complete(world: World, reports: list[Report]) -> World:
    """The world with what the environment did not tell: places of ranks and nodes, from the machines' own names."""
    machines = list(dict.fromkeys(entry.machine for entry in reports))  # a node's number: that of its first rank
    mine = reports[world.rank].machine
    here = [entry.rank for entry in reports if entry.machine == mine]
    found = {
        "local_rank": here.index(world.rank),
        "local_world_size": len(here),
        "node_rank": machines.index(mine),
        "num_nodes": len(machines),
    }
    # A hand-set environment without the number of nodes only supposes that all have equally many ranks.
    said = {entry.field for entry in world.evidence if entry.source}
    supposed = {"node_rank", "num_nodes"} - said if world.launcher == "environment" else set()
    values = {name: value for name, value in found.items() if getattr(world, name) is None or name in supposed}
    note = "from the names of the machines, when the ranks met"
    return world.with_facts(*(Evidence(name, "", note) for name in values), **values)
