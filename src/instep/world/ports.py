"""TCP ports: one that all ranks derive alike, and who holds one that is taken."""

from __future__ import annotations

import errno
import socket
import zlib
from pathlib import Path

from instep.errors import JoinError

BAND = (
    20_000,
    29_499,
)  # inclusive; below Linux's own ephemeral range, and without torch's 29500 that others fix
_EPHEMERAL_DEFAULT = (32_768, 60_999)
_NO_SUCH_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}  # a machine without IPv6


def ephemeral_range() -> tuple[int, int]:
    """The ports (first, last) that the kernel hands out to outgoing connections: ip(7), ip_local_port_range."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _EPHEMERAL_DEFAULT


def band(ephemeral: tuple[int, int]) -> tuple[int, int]:
    """The ports (first, last) to choose from: outside the ephemeral range, above the well-known ones."""
    first, last = ephemeral
    if last < BAND[0] or first > BAND[1]:
        return BAND
    below, above = (10_000, first - 1), (last + 1, 65_000)
    widest = max(below, above, key=lambda ports: ports[1] - ports[0])
    # A site that gives (nearly) all ports to the kernel leaves no better choice than the usual band.
    return widest if widest[1] - widest[0] >= 100 else BAND


def derive(key: str, ephemeral: tuple[int, int]) -> int:
    """A port that is the same on all ranks that share `key`: a function of the two arguments alone."""
    first, last = band(ephemeral)
    return first + zlib.crc32(key.encode()) % (last - first + 1)


def is_free(port: int) -> bool:
    """Whether this process could listen on the port, on every address of this machine.

    Without SO_REUSEADDR, so that a port which another run has bound but not yet listens on counts as taken.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:
            if error.errno in _NO_SUCH_FAMILY:
                continue
            return False
    return True


def holder(port: int) -> str:
    """Who holds the port on this machine, as far as this user may know: ``python train.py (pid 4711, user anna)``."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        connections = []
    found = [entry for entry in connections if entry.laddr and entry.laddr.port == port]
    for entry in sorted(found, key=lambda entry: entry.status != psutil.CONN_LISTEN):
        if entry.pid is None:
            continue
        try:
            process = psutil.Process(entry.pid)
            return f"{' '.join(process.cmdline())[:100]} (pid {entry.pid}, user {process.username()})"
        except psutil.Error:
            continue
    if found:
        return f"a connection in the state {found[0].status}, of a process that you may not see"
    return "a process that you may not see (ask root:  ss -ltnp)"


def taken(port: int, said_by: str) -> JoinError:
    """The error for a port that somebody else holds on the main rank's machine."""
    return JoinError(
        f"Port {port} on {socket.gethostname()}, where the ranks were to meet, is in use.",
        evidence=[f"held by {holder(port)}", f"chosen by {said_by}"],
        cure=f"End that process if it is a leftover, or meet on another port, on all ranks:  "
        f"export MASTER_PORT={derive(str(port), ephemeral_range())}",
    )
