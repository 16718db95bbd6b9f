"""The network of a sandbox: a bridge on this host, a cable to each machine, and a table that cuts some off."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.sandbox.state import tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.sandbox.state import Machine, Sandbox

NIC = "eth0"  # in a machine
DOCKER_ADDRESS = "172.17.0.1/16"  # what docker gives its bridge, the same on every machine
_RATE = re.compile(r"[1-9][0-9]{0,5}(k|m|g)bit")
_SUBNETS = 200


def check_rate(rate: str) -> str:
    """What tc calls a rate, if this is one.

    Raises:
        RunError: it is not.

    """
    if not _RATE.fullmatch(rate):
        raise RunError(f"--net {rate} is not a rate", cure="such as 100mbit, 512kbit or 1gbit")
    return rate


def free_subnet(taken: Sequence[int]) -> int:
    """The first K of 10.77.K.0/24 that nothing on this host uses.

    Raises:
        RunError: all are in use.

    """
    used = [ipaddress.ip_network(address, strict=False) for address in _addresses()]
    for number in range(_SUBNETS):
        network = ipaddress.ip_network(f"10.77.{number}.0/24")
        if number not in taken and not any(network.overlaps(other) for other in used):
            return number
    raise RunError("there is no free network for a sandbox", evidence=["10.77.0.0/24 and all after it are in use"])


def _addresses() -> list[str]:
    """The networks that this host's interfaces and routes know, but for the default route."""
    found = [route["dst"] for route in _json("route", "show", "table", "all")]
    for link in _json("address", "show"):
        found += [f"{one['local']}/{one['prefixlen']}" for one in link.get("addr_info", []) if one["family"] == "inet"]
    return [address for address in found if address[:1].isdigit() and not address.startswith("0.0.0.0")]  # noqa: S104


def _json(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run(["ip", "-4", "-json", *words], capture_output=True, text=True, check=True)
    values: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return values


def add_bridge(sandbox: Sandbox) -> None:
    """Make the network, with this host on it."""
    _batch(
        [
            f"link add {sandbox.bridge} type bridge",
            f"address add {sandbox.gateway}/24 dev {sandbox.bridge}",
            f"link set {sandbox.bridge} up",
        ]
    )


def wire(sandbox: Sandbox, machine: Machine, pid: int) -> None:
    """Give the network namespace of a process a cable to the bridge, and the machine's address.

    Args:
        sandbox: the sandbox.
        machine: which machine.
        pid: a process in the machine's network namespace.

    """
    port = sandbox.port(machine)
    _batch(
        [
            f"link add {port} type veth peer name {NIC} netns {pid}",
            f"link set {port} master {sandbox.bridge} up",
        ]
    )
    inside = [
        "link set lo up",
        f"address add {machine.address}/24 dev {NIC}",
        f"link set {NIC} up",
    ]
    if sandbox.docker:
        inside += [
            "link add docker0 type veth peer name docker1",
            f"address add {DOCKER_ADDRESS} dev docker0",
            "link set docker0 up",
            "link set docker1 up",
        ]
    enter = ["nsenter", "-t", str(pid), "--net"]
    _batch(inside, enter)
    if sandbox.rate:
        shape = ["root", "tbf", "rate", sandbox.rate, "burst", "256kb", "latency", "50ms"]
        _run(["tc", "qdisc", "add", "dev", port, *shape])
        _run([*enter, "tc", "qdisc", "add", "dev", NIC, *shape])


def unwire(sandbox: Sandbox, machine: Machine) -> None:
    """Pull the cable: what the machine says while it dies is heard by nobody."""
    _delete_link(sandbox.port(machine))


def set_cut(sandbox: Sandbox) -> None:
    """Drop all that goes to or comes from the machines in ``sandbox.cut``, in silence; let all else pass."""
    table = f"bridge instep-{sandbox.name}"
    lines = [f"add table {table}", f"delete table {table}"]
    if sandbox.cut:
        ports = ", ".join(f'"{sandbox.port(sandbox.machine(name))}"' for name in sandbox.cut)
        lines.append(f"add table {table}")
        # From a port to a port, from a port to this host, from this host to a port.
        for hook, tests in (("forward", "io"), ("input", "i"), ("output", "o")):
            lines.append(f"add chain {table} {hook} {{ type filter hook {hook} priority 0; policy accept; }}")
            lines += [f"add rule {table} {hook} {test}ifname {{ {ports} }} drop" for test in tests]
    _run(["nft", "-f", "-"], "\n".join(lines) + "\n")


def remove(name: str) -> None:
    """Take away all of a sandbox's network that is there."""
    done = subprocess.run(["nft", "list", "tables", "bridge"], capture_output=True, text=True, check=False)
    if f"table bridge instep-{name}" in done.stdout.splitlines():
        _run(["nft", "delete", "table", "bridge", f"instep-{name}"])
    for link in _json("link", "show"):
        if re.fullmatch(f"isb-{tag(name)}|is-{tag(name)}-n[0-9]+", link["ifname"]):
            _delete_link(link["ifname"])


def exists(link: str) -> bool:
    """There is an interface of that name."""
    return any(one["ifname"] == link for one in _json("link", "show"))


def _delete_link(name: str) -> None:
    # It may go by itself at any moment, with the network namespace of its other end.
    done = subprocess.run(["ip", "link", "delete", name], capture_output=True, text=True, check=False)
    if done.returncode and exists(name):
        raise RunError(f"the interface {name} cannot be removed", evidence=[done.stderr.strip()])


def _batch(lines: Sequence[str], enter: Sequence[str] = ()) -> None:
    _run([*enter, "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _run(argv: Sequence[str], given: str = "") -> None:
    done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            "the sandbox's network cannot be made as asked",
            evidence=[" ".join(argv), *given.splitlines(), *done.stderr.splitlines()],
            cure="a kernel with veth, bridge, tbf and nftables is needed; does another program change the network?",
        )
