"""What is known of a sandbox, and where it is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.errors import RunError

BASE = Path("/var/lib/instep/sandbox")
DEFAULT = "sandbox"
MARKER = "INSTEP_SANDBOX"  # in the environment of what carries a machine: the machine's folder
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
_STATE = "state.json"


@dataclass(frozen=True)
class User:
    """Who may log in, besides root."""

    name: str
    uid: int
    gid: int
    group: str
    home: str


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        name: its host name.
        address: its address on the sandbox's network.
        machine_id: what systemd knows it by.

    """

    name: str
    address: str
    machine_id: str


@dataclass(frozen=True)
class Process:
    """A process that runs a machine; `start` (clock ticks after boot) tells it from a later one of the same number."""

    pid: int
    start: int


@dataclass
class Sandbox:
    """A practice cluster.

    Attributes:
        image: of the containers; and `vm_image`, what virtual machines start from; `accelerator`: what runs them.
        subnet: K of 10.77.K.0/24.
        command: what was typed to make it.
        phase: ``starting``, or ``up`` once all machines have answered.
        boot: the host's boot in which it was started.
        mounts: what every machine sees, as (path, ``rw`` or ``ro``).
        python: what ``/usr/bin/python3`` leads to, if not to the release's own.
        rate: what each machine may send and receive, such as ``100mbit``.
        disk: size of a file system of its own on /scratch, in the kernel's words, such as ``500m``.
        running: the process that runs each machine.
        switch: the process that holds their network.
        cut: the machines without network.

    """

    name: str
    kind: str
    release: str
    image: str
    subnet: int
    machines: list[Machine]
    user: User
    command: str
    boot: str
    vm_image: str = ""
    accelerator: str = ""
    phase: str = "starting"
    mounts: list[tuple[str, str]] = field(default_factory=list)
    python: str = ""
    rate: str = ""
    disk: str = ""
    slurm: bool = True
    loopback_names: bool = False
    docker: bool = False
    running: dict[str, Process] = field(default_factory=dict)
    switch: Process | None = None
    cut: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where all of it is kept."""
        return BASE / self.name

    @property
    def ssh_config(self) -> Path:
        """How to reach the machines."""
        return self.folder / "ssh_config"

    @property
    def inventory(self) -> Path:
        """What ``instep run --inventory`` takes."""
        return self.folder / "inventory.toml"

    @property
    def key(self) -> Path:
        """The private key that opens all machines."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The machines' own public keys."""
        return self.folder / "known_hosts"

    @property
    def shared(self) -> Path:
        """A folder that all machines see, as /shared as well."""
        return self.folder / "shared"

    @property
    def gateway(self) -> str:
        """The address of this host on the sandbox's network."""
        return f"10.77.{self.subnet}.254"

    @property
    def link(self) -> str:
        """The interface of this host on the sandbox's network."""
        return link_name(self.name)

    def place(self, machine: Machine) -> Path:
        """The folder of a machine."""
        return self.folder / "machines" / machine.name

    def machine(self, name: str) -> Machine:
        """The machine of that name.

        Raises:
            RunError: there is none.

        """
        for machine in self.machines:
            if machine.name == name:
                return machine
        names = ", ".join(machine.name for machine in self.machines)
        raise RunError(f"sandbox {self.name} has no machine {name!r}", cure=f"one of: {names}")

    def save(self) -> None:
        """Write it down, whole or not at all."""
        part = self.folder / f"{_STATE}.part"
        part.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        part.replace(self.folder / _STATE)


def link_name(name: str) -> str:
    """The interface of this host for a sandbox: at most 15 letters, whatever the name."""
    short = name if len(name) <= 12 else name[:6].rstrip("-") + hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"is-{short}"


def option(sandbox: Sandbox) -> str:
    """What to add to a command that means this sandbox."""
    return "" if sandbox.name == DEFAULT else f" --name {sandbox.name}"


def check_name(name: str) -> str:
    """The name, if it can be one.

    Raises:
        RunError: it cannot.

    """
    if not _NAME.fullmatch(name) or name.endswith("-"):
        raise RunError(
            f"{name!r} cannot be the name of a sandbox",
            cure="take lower-case letters, digits and dashes, a letter first, at most 20 of them",
        )
    return name


def load(name: str) -> Sandbox | None:
    """The sandbox of that name, or None where there is none that can be read."""
    try:
        values: dict[str, Any] = json.loads((BASE / check_name(name) / _STATE).read_bytes())
        values["machines"] = [Machine(**one) for one in values["machines"]]
        values["user"] = User(**values["user"])
        values["mounts"] = [(path, how) for path, how in values["mounts"]]
        values["running"] = {key: Process(**one) for key, one in values["running"].items()}
        values["switch"] = Process(**values["switch"]) if values.get("switch") else None
        return Sandbox(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def names() -> list[str]:
    """All that have a folder, also where it is in disorder."""
    try:
        return sorted(one.name for one in BASE.iterdir() if one.is_dir() and _NAME.fullmatch(one.name))
    except OSError:
        return []


def boot_id() -> str:
    """Names this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
