"""Where the ranks of several machines meet: an address and a port that were tried from every machine.

With it, the interface of each machine that leads there. Names are not asked: on many machines the own name means
127.0.1.1. Every machine listens (the main one on the master port, which it keeps), then every machine tries all
addresses of all others, then :func:`choose` decides::

    main machine    Listener(token, ports=machine.ports, key=job)
    the others      Listener(token)
    launcher        peers = [{host, addresses: addresses_of(facts, hint), port, token}, ...]
    all             reached = reach(whom(peers, number of this machine))
    launcher        choose([Party(host, facts, reached), ...], hint)
    main machine    release() just before the ranks start, close() after the last has gone

The token may be the same for all machines of one job.
"""

from __future__ import annotations

import errno
import ipaddress
import queue
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.planning.place import LOOPBACK
from instep.launch.preflight.compare import table
from instep.launch.preflight.facts import interfaces
from instep.launch.ranks import port as ports_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PATIENCE_S = 2.0  # for one address; all are tried at once
_MOMENT_S = 0.3  # what a machine's other addresses have, once one has answered
_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "podman")
_MOST_ADDRESSES = 16  # of one machine: each is tried from every other
_ALL_PAIRS = 32  # machines; from here on not every one tries every other


class Listener:
    """Answers a token to whoever connects, until :meth:`release`. Runs in the agent, on a thread of its own.

    Attributes:
        port: where it listens.
        held: with `ports`: the reservation of the port, bound but not listening, so that rank 0 can listen beside it;
            to be kept open until the last rank has gone.

    """

    def __init__(self, token: str, *, ports: tuple[int, int] | None = None, key: str = "") -> None:
        """Bind, and answer from now on.

        Args:
            token: what is answered.
            ports: the main machine's: the range that the master port is taken from. None: any port of the kernel's own
                choice, as gloo and NCCL do it.
            key: makes the first choice of the port stable: the same key tries the same ports in the same order.

        Raises:
            RunError: the whole range is taken.

        """
        self._token = token
        self.held: socket.socket | None = None
        if ports is not None:
            self.held = ports_of.reserve(ports, key)
            self._listening = ports_of.beside(self.held)
        else:
            self._listening = ports_of.any_port()
        self._listening.listen(128)
        self.port: int = self._listening.getsockname()[1]
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while not self._leaving.is_set():
            try:
                caller, _ = self._listening.accept()
            except OSError:  # a caller who has gone again; or we are leaving
                continue
            with caller, suppress(OSError):
                caller.settimeout(0.5)
                caller.sendall(f"{self._token} {_plain(caller.getsockname()[0])}\n".encode())
                caller.recv(1)  # who closes first keeps the port in TIME_WAIT: let that be the other's

    def release(self) -> None:
        """Stop answering; the port stays reserved where it was held. May be called again."""
        self._leaving.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listening.close()

    def close(self) -> None:
        """Stop answering and give up the port."""
        self.release()
        if self.held is not None:
            self.held.close()


def whom(peers: Sequence[Mapping[str, Any]], number: int) -> list[Mapping[str, Any]]:
    """Of all machines those that the machine of this number is to try: all, or of very many the main one and the next.

    The main machine tries itself too: behind a translation of addresses it may not reach its own.
    """
    if len(peers) <= _ALL_PAIRS:
        return list(peers)
    after = [peers[(number + step) % len(peers)] for step in (1, 2, 3)]
    return list({peer["host"]: peer for peer in (peers[0], *after)}.values())


def reach(peers: Sequence[Mapping[str, Any]], *, patience_s: float = PATIENCE_S) -> dict[str, dict[str, Any]]:
    """Try all addresses of all machines at once, from this one. Runs in the agent of every machine.

    Args:
        peers: see :func:`whom`; of each: host, addresses, port, token.
        patience_s: seconds for each address.

    Returns:
        host -> address -> {own: this machine's address on the way there, interface: its name, there: the address that
        the other was reached on}, or {why: a reason} where that machine did not answer.

    """
    names = {address: name for name, address, _ in interfaces()}
    found: queue.SimpleQueue[tuple[str, str, dict[str, str]]] = queue.SimpleQueue()

    def attempt(peer: Mapping[str, Any], address: str) -> None:
        found.put((peer["host"], address, _try(address, peer["port"], peer["token"], names, patience_s)))

    waiting = [(peer, address) for peer in peers for address in peer["addresses"]]
    for each in waiting:
        threading.Thread(target=attempt, args=each, daemon=True).start()
    return _collect(found, [(peer["host"], address) for peer, address in waiting], patience_s)


def _collect(
    found: queue.SimpleQueue[tuple[str, str, dict[str, str]]], waiting: Sequence[tuple[str, str]], patience_s: float
) -> dict[str, dict[str, Any]]:
    """Wait for what is tried; where a machine has answered at one address, no longer than a moment for its others."""
    reached: dict[str, dict[str, Any]] = {host: {} for host, _ in waiting}
    late: dict[str, float] = {}
    for host, address in waiting:
        reached[host][address] = {"why": "no answer"}
        late[host] = time.monotonic() + patience_s + 0.2
    missing = set(waiting)
    while missing:
        end = max(late[host] for host, _ in missing)
        try:
            host, address, way = found.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        reached[host][address] = way
        missing.discard((host, address))
        if "why" not in way:
            late[host] = min(late[host], time.monotonic() + _MOMENT_S)
    return reached


def _try(address: str, port: int, token: str, names: Mapping[str, str], patience_s: float) -> dict[str, str]:
    try:
        with socket.create_connection((address, port), patience_s) as connection:
            connection.settimeout(patience_s)
            own = _plain(connection.getsockname()[0])
            said = connection.makefile("rb").readline(400).decode(errors="replace").strip()
    except OSError as error:
        return {"why": _reason(error)}
    who, _, there = said.rpartition(" ")
    if who != token:
        return {"why": "another one answers there"}
    return {"own": own, "interface": names.get(own, ""), "there": there}


def _reason(error: OSError) -> str:
    """In a few words, for a table."""
    if isinstance(error, TimeoutError):
        return "no answer"
    known = {
        errno.ECONNREFUSED: "refused",
        errno.ENETUNREACH: "no route",
        errno.EHOSTUNREACH: "no route",
        errno.ETIMEDOUT: "no answer",
    }
    return known.get(error.errno or 0, error.strerror or str(error))


def _plain(address: str) -> str:
    """As interfaces have it: an IPv4 address of a socket for both families is written ::ffff:10.0.0.1."""
    return address.partition("%")[0].removeprefix("::ffff:")


def addresses_of(facts: Mapping[str, Any], hint: str = "") -> list[str]:
    """The addresses of a machine that are worth a try, the likeliest first.

    Args:
        facts: what the machine has said.
        hint: where the user says it is reached: an address, or a name that is looked up here; "" where nothing is said.

    """
    # Bridges of containers come last: what they lead to is on the machine itself.
    named = sorted(facts["interfaces"], key=lambda entry: entry[0].startswith(_BRIDGES))
    own = [address for _, address, _ in named]
    try:
        hinted = [str(entry[4][0]) for entry in socket.getaddrinfo(hint, 1, type=socket.SOCK_STREAM)] if hint else []
    except OSError:
        hinted = []
    return [address for address in dict.fromkeys([*hinted, *own]) if _is_usable(address)][:_MOST_ADDRESSES]


def _is_usable(address: str) -> bool:
    """Not the loopback, and no IPv6 address that means nothing without the name of an interface."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or (parsed.version == 6 and parsed.is_link_local))


@dataclass(frozen=True)
class Party:
    """One machine at the meeting.

    Attributes:
        host: as the user named it.
        facts: what it has said of itself.
        reached: what its :func:`reach` brought.

    """

    host: str
    facts: Mapping[str, Any]
    reached: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet.

    Attributes:
        address: of the main machine.
        ways: of each machine, in their order: its own address towards the others, and the interface of it.

    """

    address: str
    ways: tuple[tuple[str, str], ...]


def choose(parties: Sequence[Party], hint: str = "") -> Meeting:
    """The first address of the main machine that all machines have reached, and from each the way there.

    Of several that serve, the one that the user has named goes first, then the one where most machines use an interface
    of the same name, then the kernel's order.

    Args:
        parties: all machines, the main one first.
        hint: the main machine's address as the user gave it, "" where he did not.

    Raises:
        RunError: no address of the main machine is reached by all, or two others do not reach each other.

    """
    main = parties[0]
    if len(parties) == 1:
        return Meeting(LOOPBACK, ((LOOPBACK, ""),))
    candidates = addresses_of(main.facts, hint)
    meetings = [found for address in candidates if (found := _meeting(parties, address))]
    if not meetings:
        raise _nobody(parties, candidates)
    whole = [meeting for meeting in meetings if not _missing(parties, meeting)]
    if not whole:
        raise _apart(parties, meetings[0], _missing(parties, meetings[0]))
    hinted = addresses_of({"interfaces": []}, hint)
    return min(whole, key=lambda meeting: (meeting.address not in hinted, -_agreement(meeting)))  # the first of equals


def _agreement(meeting: Meeting) -> int:
    return max(Counter(name for _, name in meeting.ways).values())


def _meeting(parties: Sequence[Party], address: str) -> Meeting | None:
    """The meeting at this address of the main machine, if all reach it."""
    main = parties[0]
    seen = [party.reached.get(main.host, {}).get(address, {"why": "not tried"}) for party in parties]
    if any("why" in way for way in seen):
        return None
    # Behind a translation of addresses the main machine holds another one than the others use.
    there = Counter(way["there"] for way in seen[1:]).most_common(1)[0][0]
    held = {own: name for name, own, _ in main.facts["interfaces"]}
    return Meeting(address, ((address, held.get(there, "")), *((way["own"], way["interface"]) for way in seen[1:])))


def _missing(parties: Sequence[Party], meeting: Meeting) -> list[tuple[str, str, str, str]]:
    """(from, to, address, why) where one machine was to reach another's address and did not; untried is no fault."""
    found = []
    for party, (own, _) in zip(parties[1:], meeting.ways[1:], strict=True):
        for other in parties:
            way = other.reached.get(party.host, {}).get(own, {})
            if other is not party and "why" in way:
                found.append((other.host, party.host, own, way["why"]))
    return found


_FIREWALL = """\
let the machines talk to each other on all TCP ports (gloo and NCCL choose theirs freely); see what is in the way:
  sudo nft list ruleset      (or: sudo iptables -S, sudo ufw status, sudo firewall-cmd --list-all)"""


def _nobody(parties: Sequence[Party], candidates: Sequence[str]) -> RunError:
    """No address of the main machine will do: who reaches what."""
    main = parties[0]
    if not candidates:
        return RunError(
            f"{main.host}, where the ranks were to meet, has no address but the loopback",
            evidence=[f"{name}: {address}" for name, address, _ in main.facts["interfaces"]],
            cure=f"bring its network up, or put another machine first; look:  ssh {main.host} ip address",
        )
    names = {address: name for name, address, _ in main.facts["interfaces"]}
    rows = [["", *(f"{address} ({names[address]})" if address in names else address for address in candidates)]]
    for party in parties[1:]:
        ways = party.reached.get(main.host, {})
        rows.append([party.host, *(ways.get(address, {}).get("why", "reached") for address in candidates)])
    return RunError(
        f"the machines do not all reach {main.host}, where the ranks were to meet", evidence=table(rows), cure=_FIREWALL
    )


def _apart(parties: Sequence[Party], meeting: Meeting, missing: Sequence[tuple[str, str, str, str]]) -> RunError:
    """All reach the main machine, but not each other."""
    there = parties[0].host
    return RunError(
        f"all machines reach {there}, but not each other",
        evidence=[f"{one} → {other} ({address}): {why}" for one, other, address, why in missing[:10]]
        + ([f"... and {len(missing) - 10} more"] if len(missing) > 10 else [])
        + [f"{there} is reached at {meeting.address}"],
        cure=_FIREWALL,
    )
