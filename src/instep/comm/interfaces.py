"""The network interface between the nodes, for gloo and NCCL, each in the syntax that it understands.

gloo resolves the host name and takes that address, which on many machines is 127.0.1.1 or a container bridge;
NCCL takes the first interface that looks usable. Both listen to a variable.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from instep.errors import JoinError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from instep.comm.rollcall import Report


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the route to a host; empty if there is no route. Nothing is sent."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # for a datagram socket only a look into the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def choose(reports: Sequence[Report], rank: int, addresses: Mapping[str, Sequence[str]]) -> str:
    """The interface through which this rank's machine reaches the others.

    On a machine other than the main rank's it is the one on the route to the main rank, whose address every rank
    has reported. On the main rank's machine that route is the loopback, so there it is the one on the route to a
    rank of another machine.

    Args:
        reports: those of all ranks.
        rank: this rank.
        addresses: the addresses of each interface here.

    Returns:
        Its name; empty if it cannot be told.

    """
    mine = reports[rank]
    address = mine.address
    if mine.machine == reports[0].machine:
        other = next((entry for entry in reports if entry.machine != mine.machine), None)
        address = address_towards(other.address, 1) if other is not None and other.address else ""
    return next((name for name, found in addresses.items() if address in found), "")


def here() -> dict[str, list[str]]:
    """The addresses of each interface of this machine."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.split("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def bind(reports: Sequence[Report], rank: int, env: MutableMapping[str, str]) -> None:
    """Tell gloo and NCCL which interface to use, unless the user has.

    Raises:
        JoinError: the user named one that is not there, or in the other's syntax.

    """
    several = len({entry.machine for entry in reports}) > 1
    addresses = here()
    _check_users(env, addresses)
    name = choose(reports, rank, addresses) if several else _loopback(addresses)
    if not name:
        return
    env.setdefault("GLOO_SOCKET_IFNAME", name)
    if several:
        env.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": this name, not all that begin with it


def _loopback(addresses: Mapping[str, Sequence[str]]) -> str:
    return next((name for name, found in addresses.items() if "127.0.0.1" in found), "")


def _check_users(env: Mapping[str, str], addresses: Mapping[str, Sequence[str]]) -> None:
    """Gloo takes one name or several with commas; '^', '=' and prefixes are NCCL's."""
    given = env.get("GLOO_SOCKET_IFNAME", "")
    unknown = [name for name in given.split(",") if name and name not in addresses]
    if unknown:
        raise JoinError(
            f"gloo cannot use the network interface {unknown[0]!r}: there is none of that name on "
            f"{socket.gethostname()}.",
            evidence=[
                f"GLOO_SOCKET_IFNAME={given}",
                *(f"{name}: {', '.join(found)}" for name, found in addresses.items() if found),
            ],
            cure="Give the plain name of one of these (^docker and =eth0 are NCCL's syntax), or unset the variable: "
            "instep takes the one on the route to the main rank.",
        )
