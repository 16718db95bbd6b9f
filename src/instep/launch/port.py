"""A master port that no other job can take, from before the first rank starts until the last has gone."""

from __future__ import annotations

import errno
import random
import socket

from instep.errors import RunError


def reserve(ports: tuple[int, int]) -> socket.socket:
    """Bind a free port of the range and keep it for rank 0; the returned socket is the reservation.

    Bound *without* SO_REUSEADDR, so that of all who try the same port one succeeds; then SO_REUSEADDR is set on the
    bound socket, which lets rank 0's store (libuv and torch's own server both set it) bind and listen beside it,
    while the test of the next launcher still finds the port taken.

    Raises:
        RunError: the whole range is taken.

    """
    first, last = ports
    candidates = random.SystemRandom().sample(range(first, last + 1), last - first + 1)
    for port in candidates:
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
