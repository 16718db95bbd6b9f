"""A master port that no other job can take, from before the first rank starts until the last has gone."""

from __future__ import annotations

import errno
import random
import socket
import zlib
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence


def reserve(ports: tuple[int, int], key: str = "") -> socket.socket:
    """Bind a free port of the range and keep it for rank 0; the returned socket is the reservation.

    Bound *without* SO_REUSEADDR, so that of all who try the same port one succeeds; then SO_REUSEADDR is set on the
    bound socket, which lets rank 0's store (libuv and torch's own server both set it) bind and listen beside it,
    while the test of the next launcher still finds the port taken.

    Args:
        ports: the first and the last of the range.
        key: the same key tries the same ports in the same order; "" is any order.

    Raises:
        RunError: the whole range is taken.

    """
    first, last = ports
    for port in _order(ports, key):
        try:
            held = _bind(port)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise RunError(
        f"no free TCP port from {first} to {last} on {socket.gethostname()}",
        cure="see who holds them:  ss -ltn",
    )


def _order(ports: tuple[int, int], key: str) -> Sequence[int]:
    first, last = ports
    if not key:
        return random.SystemRandom().sample(range(first, last + 1), last - first + 1)
    start = first + zlib.crc32(key.encode()) % (last - first + 1)
    return [*range(start, last + 1), *range(first, start)]


def beside(held: socket.socket) -> socket.socket:
    """A second socket on a reserved port, as rank 0's store makes one: it may listen while nobody else does."""
    second = socket.socket(held.family, socket.SOCK_STREAM)
    second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if held.family == socket.AF_INET6:
        second.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    second.bind(("", held.getsockname()[1]))
    return second


def any_port() -> socket.socket:
    """A socket on a port of the kernel's choice, on all addresses."""
    return _bind(0)


def _bind(port: int) -> socket.socket:
    """On all addresses of both families where there is IPv6, else of IPv4."""
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", port))
    except OSError as error:
        held.close()
        if held.family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:  # IPv6 switched off at run time
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.bind(("", port))
            return held
        raise
    return held
