"""Machines for tests: each has its own network, host name, process table and /etc/hosts; files are shared.

    with hosts(["n1", "n2"]) as (n1, n2):
        n1.run(["ping", "-c1", "n2"])

A machine is one process in namespaces of its own. When that process dies, for whatever reason, the kernel ends
everything that runs on the machine and removes its interfaces; nothing of the host is touched.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.commands import run_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.commands import Result

DOCKER_ADDR = "172.17.0.1"  # the same on every machine: nobody can be reached through it

# The first process of a machine: its own view of /sys and /dev/shm, then wait, and reap what is orphaned.
BOOT = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm \
&& ip link set lo up && echo up && { sleep infinity & wait; }
"""


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    addr: str
    pid: int

    def argv(self, command: Sequence[str | Path], *, cwd: str | Path | None = None) -> list[str]:
        """The command line that runs a command on this machine."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *map(str, command)]

    def run(
        self,
        command: Sequence[str | Path],
        *,
        limit_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str = "",
    ) -> Result:
        """Run a command on this machine to its end, see :func:`tests.commands.run_command`."""
        return run_command(self.argv(command, cwd=cwd), limit_s=limit_s, env=env, stdin=stdin)


@contextmanager
def hosts(
    names: Sequence[str], *, second_nic: bool = False, docker: bool = False, loopback_name: bool = False
) -> Iterator[list[Host]]:
    """Machines on one network (10.88.0.0/24 on eth0); they are gone at the end.

    Args:
        names: their host names; each resolves on all of them.
        second_nic: a second network between them (10.99.0.0/24 on eth1), whose addresses no name has.
        docker: an interface ``docker0`` that is up and has the same address on all of them.
        loopback_name: each machine's own name resolves to 127.0.1.1 there, as on a stock Debian.

    """
    machines: list[Host] = []
    holders: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="instep-hosts-") as folder:
        try:
            for number, name in enumerate(["switch", *names]):
                table = Path(folder, name)
                table.write_text(_etc_hosts(names, name if loopback_name else None))
                holder = _boot(name, table)
                holders.append(holder)
                machines.append(Host(name, _addr(88, number), _first_child(holder.pid)))
            switch, *members = machines
            _wire(switch, members, second_nic=second_nic)
            if docker:
                for member in members:
                    _add_docker(member)
            yield members
        finally:
            for holder in holders:
                holder.kill()
            for holder in holders:
                holder.wait()


def _addr(network: int, number: int) -> str:
    return f"10.{network}.0.{number}"


def _etc_hosts(names: Sequence[str], on_loopback: str | None) -> str:
    lines = ["127.0.0.1 localhost"]
    for number, name in enumerate(names, start=1):
        lines.append(f"{'127.0.1.1' if name == on_loopback else _addr(88, number)} {name}")
    return "\n".join(lines) + "\n"


def _boot(name: str, table: Path) -> subprocess.Popen[str]:
    unshare = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-c", BOOT, "boot", name, str(table)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n", f"machine {name} did not start"
    return holder


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _wire(switch: Host, members: Sequence[Host], *, second_nic: bool) -> None:
    """One bridge for each network, in the switch's namespace, and a cable from it to each machine."""
    for nic, network in [("eth0", 88), ("eth1", 99)][: 2 if second_nic else 1]:
        _ip(switch, f"link add br{network} type bridge", f"link set br{network} up")
        for number, member in enumerate(members, start=1):
            port = f"p{network}-{number}"
            _ip(
                switch,
                f"link add {port} type veth peer name {nic} netns {member.pid}",
                f"link set {port} master br{network} up",
            )
            _ip(member, f"addr add {_addr(network, number)}/24 dev {nic}", f"link set {nic} up")


def _add_docker(member: Host) -> None:
    _ip(
        member,
        "link add docker0 type veth peer name docker1",
        f"addr add {DOCKER_ADDR}/16 dev docker0",
        "link set docker0 up",
        "link set docker1 up",
    )


def _ip(host: Host, *commands: str) -> None:
    """`ip` in the machine's network only: process ids keep their meaning."""
    subprocess.run(
        ["nsenter", "-t", str(host.pid), "--net", "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        check=True,
    )
