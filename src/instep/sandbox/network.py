"""The network of a sandbox: a bridge, a cable to this host and to each machine, and rules that cut some off."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.sandbox import processes
from instep.sandbox.state import MARKER, Process, link_name, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.sandbox.state import Machine, Sandbox

BRIDGE = "bridge"
NIC = "eth0"  # in a machine
DOCKER_ADDRESS = "172.17.0.1/16"  # what docker gives its bridge, the same on every machine
_RATE = re.compile(r"[1-9][0-9]{0,5}(k|m|g)bit")
_SUBNETS = 200
_SPACE_S = 10.0


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


def open_switch(sandbox: Sandbox) -> Process:
    """Make the network, with this host on it.

    The bridge is in a network namespace of its own, where no rule of this host (docker's, a firewall's) reaches it,
    and it is gone with the process that holds the namespace.

    Returns:
        that process, which outlives this one.

    """
    place = sandbox.folder / "switch"
    place.mkdir()
    holder = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath), MARKER: str(place)},
        start_new_session=True,
        cwd="/",
    )
    await_space(holder)
    start = processes.start_of(holder.pid)
    holder.returncode = 0  # it is a daemon from now on: nobody waits for it
    switch = Process(holder.pid, start or 0)
    _batch(
        [
            f"link add {sandbox.link} type veth peer name host netns {holder.pid}",
            f"address add {sandbox.gateway}/24 dev {sandbox.link}",
            f"link set {sandbox.link} up",
        ]
    )
    lines = [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up", f"link set host master {BRIDGE} up"]
    _batch(lines, _space(switch.pid))
    return switch


def await_space(process: subprocess.Popen[bytes]) -> None:
    """Until a process has a network namespace of its own.

    Raises:
        RunError: it does not get one; it is ended.

    """
    ours = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + _SPACE_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() != ours:
                return
        time.sleep(0.002)
    process.kill()
    process.wait()
    raise RunError("the kernel gives no network namespace", cure="try it by hand:  unshare --mount --net true")


def wire(sandbox: Sandbox, machine: Machine, pid: int) -> None:
    """Give the network namespace of a process a cable to the bridge, and the machine's address.

    Args:
        sandbox: the sandbox.
        machine: which machine.
        pid: a process in the machine's network namespace.

    """
    port = machine.name
    switch, member = inside(sandbox), _space(pid)
    _batch([f"link add {port} type veth peer name {NIC} netns {pid}", f"link set {port} master {BRIDGE} up"], switch)
    lines = ["link set lo up", f"address add {machine.address}/24 dev {NIC}", f"link set {NIC} up"]
    if sandbox.docker:
        lines += [
            "link add docker0 type veth peer name docker1",
            f"address add {DOCKER_ADDRESS} dev docker0",
            "link set docker0 up",
            "link set docker1 up",
        ]
    _batch(lines, member)
    if sandbox.rate:
        _run([*switch, "tc", "qdisc", "add", "dev", port, *shape(sandbox.rate)])
        _run([*member, "tc", "qdisc", "add", "dev", NIC, *shape(sandbox.rate)])


def shape(rate: str) -> list[str]:
    """What tc does with a rate."""
    return ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]


def plug(sandbox: Sandbox, machine: Machine) -> None:
    """A socket on the bridge for a virtual machine, which finds its address itself."""
    switch, port = inside(sandbox), machine.name
    _batch([f"tuntap add dev {port} mode tap", f"link set {port} master {BRIDGE} up"], switch)
    if sandbox.rate:
        _run([*switch, "tc", "qdisc", "add", "dev", port, *shape(sandbox.rate)])


def unwire(sandbox: Sandbox, machine: Machine) -> None:
    """Pull the cable: what the machine says while it dies is heard by nobody."""
    _delete_link(machine.name, inside(sandbox))


def set_cut(sandbox: Sandbox) -> None:
    """Drop all that goes to or comes from the machines in ``sandbox.cut``, in silence; let all else pass."""
    table = "bridge cut"
    lines = [f"add table {table}", f"delete table {table}"]
    if sandbox.cut:
        ports = ", ".join(f'"{name}"' for name in sandbox.cut)
        lines.append(f"add table {table}")
        lines.append(f"add chain {table} forward {{ type filter hook forward priority 0; policy accept; }}")
        lines += [f"add rule {table} forward {way}ifname {{ {ports} }} drop" for way in "io"]
    _run([*inside(sandbox), "nft", "-f", "-"], "\n".join(lines) + "\n")


def inside(sandbox: Sandbox) -> list[str]:
    """What to put before a command, for it to run in the network namespace of the bridge.

    Raises:
        RunError: the namespace is gone.

    """
    if sandbox.switch is None or not processes.lives(sandbox.switch):
        raise RunError(
            f"the network of sandbox {sandbox.name} is gone",
            evidence=["the process that held it has been ended"],
            cure=f"instep sandbox down{option(sandbox)}",
        )
    return _space(sandbox.switch.pid)


def _space(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net"]


def remove(name: str) -> None:
    """Take away what this host has of a sandbox's network; the rest goes with the processes."""
    _delete_link(link_name(name))


def _delete_link(name: str, where: Sequence[str] = ()) -> None:
    # It may go by itself at any moment, with the network namespace of its other end.
    argv = [*where, "ip", "link", "delete", name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode and "Cannot find device" not in done.stderr:
        raise RunError(f"the interface {name} cannot be removed", evidence=[done.stderr.strip()])


def _batch(lines: Sequence[str], where: Sequence[str] = ()) -> None:
    _run([*where, "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _run(argv: Sequence[str], given: str = "") -> None:
    done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            "the sandbox's network cannot be made as asked",
            evidence=[" ".join(argv), *given.splitlines(), *done.stderr.splitlines()],
            cure="a kernel with veth, bridge, tbf and nftables is needed; does another program change the network?",
        )
