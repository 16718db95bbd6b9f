"""Where the ranks meet: the URL, the main rank's address, the port."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from instep.errors import JoinError, WorldError
from instep.world import ports
from instep.world.launchers import slurm
from instep.world.record import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instep.world.reading import Reading

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """An address, a port, the URL of both, and the evidence. A file has neither address nor port."""

    master_addr: str
    master_port: int
    init_method: str
    evidence: tuple[Evidence, ...]


def is_loopback(host: str) -> bool:
    """Whether the text itself names this very machine: 127.x.y.z, ::1, localhost. No look-up is made."""
    if host == "localhost" or host.startswith("localhost."):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback


def find(env: Mapping[str, str], reading: Reading, init_method: str | None, ephemeral: tuple[int, int]) -> Meeting:
    """Where the ranks meet.

    Raises:
        JoinError: a URL that is none, or has no port.
        WorldError: several nodes and no address that all of them could reach.

    """
    if init_method is not None and init_method != "env://":
        return _from_url(init_method, reading)
    if reading.world_size == 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        nobody = "a world of one meets nobody"
        return Meeting(
            _LOOPBACK,
            0,
            f"tcp://{_LOOPBACK}:0",
            tuple(Evidence(field, "", nobody) for field in ("master_addr", "master_port", "init_method")),
        )
    address, why_address = _address(env, reading)
    port, why_port = _port(env, reading, ephemeral)
    _refuse_loopback(address, why_address.source or why_address.note, reading)
    in_env = bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT") and env.get("RANK") and env.get("WORLD_SIZE"))
    url = "env://" if in_env else f"tcp://{_in_url(address)}:{port}"
    why_url = Evidence("init_method", "", "the variables say all" if in_env else "address and port above")
    return Meeting(address, port, url, (why_address, why_port, why_url))


def _from_url(url: str, reading: Reading) -> Meeting:
    source = f"init_method={url!r}"
    kind, _, rest = url.partition("://")
    if kind == "file":
        if not rest.startswith("/"):
            raise JoinError(
                "A file rendezvous needs an absolute path: three slashes.",
                evidence=[source],
                cure="Write file:///shared/folder/name, a path that all ranks see.",
            )
        none = "the ranks meet in a file"
        why = (
            Evidence("master_addr", "", none),
            Evidence("master_port", "", none),
            Evidence("init_method", source),
        )
        return Meeting("", 0, url, why)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _bad_url(url, str(error)) from None
    if kind != "tcp":
        raise _bad_url(url, "it begins with none of env://, tcp://, file:///")
    if not host:
        raise _bad_url(url, "it has no host")
    if not port:
        raise _bad_url(url, "it has no port")
    _refuse_loopback(host, source, reading)
    fields = ("master_addr", "master_port", "init_method")
    return Meeting(host, port, url, tuple(Evidence(field, source) for field in fields))


def _bad_url(url: str, why: str) -> JoinError:
    return JoinError(
        f"This is no place to meet: {why}.",
        evidence=[f"init_method={url!r}"],
        cure="Write tcp://HOST:PORT, for instance tcp://10.0.0.1:29511, or file:///shared/folder/name, or env://",
    )


def _address(env: Mapping[str, str], reading: Reading) -> tuple[str, Evidence]:
    given = env.get("MASTER_ADDR", "").strip()
    if given:
        return given, Evidence("master_addr", f"MASTER_ADDR={given}")
    if reading.num_nodes == 1 or reading.local_world_size == reading.world_size:
        return _LOOPBACK, Evidence("master_addr", "", "all ranks are on this machine")
    if reading.master_addr:
        source = next(entry.source for entry in reading.evidence if entry.field == "master_addr")
        return reading.master_addr, Evidence("master_addr", source, "the first host runs rank 0")
    in_job = slurm.main_host_of_job(env)
    if in_job:
        return in_job[0], Evidence("master_addr", in_job[1], "mpirun puts rank 0 on the first host of the job")
    raise WorldError(
        f"{reading.launcher} does not say where the main rank runs, and not all {reading.world_size} ranks are known "
        "to be on this machine.",
        evidence=[*dict.fromkeys(entry.source for entry in reading.evidence if entry.source), "not set: MASTER_ADDR"],
        cure="Name the machine of rank 0 by an address that the others reach:\n"
        "Open MPI:  mpirun -x MASTER_ADDR=10.0.0.1 ...     MPICH, Intel MPI:  mpiexec -genv MASTER_ADDR 10.0.0.1 ...\n"
        "by hand:   export MASTER_ADDR=10.0.0.1     or:  instep.init('tcp://10.0.0.1:29511')",
    )


def _port(env: Mapping[str, str], reading: Reading, ephemeral: tuple[int, int]) -> tuple[int, Evidence]:
    given = env.get("MASTER_PORT", "").strip()
    if given:
        if not (given.isascii() and given.isdigit() and 0 < int(given) < 65_536):
            raise WorldError(
                "MASTER_PORT has to be a number from 1 to 65535.",
                evidence=[f"MASTER_PORT={given!r}"],
                cure="export MASTER_PORT=29511",
            )
        return int(given), Evidence("master_port", f"MASTER_PORT={given}")
    # Without a name for the job, all ranks of this launcher and user derive the same port; if two such jobs meet,
    # the second one is told who holds it.
    key = reading.port_key or f"{reading.launcher} {env.get('USER', '')} {reading.world_size}"
    return ports.derive(key, ephemeral), Evidence("master_port", "", f"derived from {key!r}")


def _refuse_loopback(address: str, source: str, reading: Reading) -> None:
    several = (reading.num_nodes or 1) > 1 or (
        reading.local_world_size is not None and reading.local_world_size < reading.world_size
    )
    if several and is_loopback(address):
        nodes = f"{reading.num_nodes} nodes" if reading.num_nodes else "several nodes"
        raise WorldError(
            f"{address} is every machine's name for itself: on {nodes} each would wait for its own.",
            evidence=[source, *(entry.source for entry in reading.evidence if entry.field == "num_nodes")],
            cure="Give the address of the main rank's machine that the others reach:  export MASTER_ADDR=10.0.0.1",
        )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
