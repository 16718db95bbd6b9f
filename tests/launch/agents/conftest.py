"""Machines with a real sshd, one pair of keys for all tests of this folder."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests import needs
from tests.launch.jobs import INSTEP, Place
from tests.real.hosts import hosts
from tests.real.sshd import sshd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.commands import Result
    from tests.real.hosts import Host


@dataclass(frozen=True)
class Machines:
    """n1, n2 and n3, and a head, which is none of them; they share their files."""

    head: Host
    nodes: tuple[Host, ...]
    ssh_config: Path

    def inventory(self, place: Place, *names: str, config: Path | None = None, slots: int = 1) -> Path:
        """A file that lists these."""
        text = f'ssh_config = "{config or self.ssh_config}"\n'
        text += "".join(f'[[machines]]\nname = "{name}"\nslots = {slots}\n' for name in names)
        return place.write("machines.toml", text)

    def run(
        self,
        place: Place,
        *words: object,
        names: tuple[str, ...] = ("n1", "n2", "n3"),
        limit_s: float = 40,
        env: dict[str, str] | None = None,
        **inventory: Any,
    ) -> Result:
        """``instep run --inventory ... WORDS`` on the head, to its end; fails if a process is left anywhere."""
        file = self.inventory(place, *names, **inventory)
        argv: list[str | Path] = [INSTEP, "run", "--inventory", file, *map(str, words)]
        return self.head.run(argv, cwd=place.path, env=place.env | (env or {}), limit_s=limit_s)

    @contextmanager
    def started(
        self, place: Place, *words: str, names: tuple[str, ...], config: Path | None = None
    ) -> Iterator[Launcher]:
        """The launcher, while it runs on the head."""
        argv: list[str | Path] = [INSTEP, "run", "--inventory", self.inventory(place, *names, config=config), *words]
        env = {"PATH": "/usr/bin:/bin", **place.env}
        with subprocess.Popen(self.head.argv(argv, cwd=place.path), stderr=subprocess.PIPE, env=env) as nsenter:
            try:
                while not (found := psutil.Process(nsenter.pid).children()):  # nsenter stands between
                    time.sleep(0.01)
                yield Launcher(nsenter, found[0])
            finally:
                nsenter.kill()

    @contextmanager
    def door(self, place: Place, number: int, more: str = "") -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
        """Another sshd on one machine, which ssh takes instead; it can be killed without harm to other tests.

        Yields:
            The file for ``ssh -F``, and the daemon.

        """
        node, folder = self.nodes[number], self.ssh_config.parent
        server = place.write("sshd_config", "")
        server.write_text((folder / "sshd_config").read_text().replace("Port 22\n", "Port 2222\n") + more)
        known = place.write("known", f"[{node.name}]:2222 {(folder / 'host_key.pub').read_text()}")
        config = place.write("config", "")
        theirs = f"    Port 2222\n    UserKnownHostsFile {known} {folder}/known_hosts\n"
        config.write_text(f"Host {node.name}\n{theirs}{self.ssh_config.read_text()}")
        argv: list[str | Path] = ["setpriv", "--pdeathsig", "KILL", "/usr/sbin/sshd", "-D", "-e", "-f", server]
        with subprocess.Popen(node.argv(argv), stderr=subprocess.PIPE) as daemon:
            try:
                assert daemon.stderr
                while b"Server listening" not in daemon.stderr.readline():
                    pass
                yield config, daemon
            finally:
                daemon.kill()

    def agent(self, number: int) -> psutil.Process:
        """The agent on a machine."""
        host = Path(f"/proc/{self.nodes[number].pid}/ns/uts").readlink()
        (found,) = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "instep.launch.agents.agent" in (process.info["cmdline"] or [])
            and Path(f"/proc/{process.pid}/ns/uts").readlink() == host
        ]
        return found


@dataclass(frozen=True)
class Launcher:
    """``instep run`` on another machine."""

    nsenter: subprocess.Popen[bytes]
    process: psutil.Process

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float) -> int:
        """Its exit code."""
        return self.nsenter.wait(limit_s)

    def said(self) -> str:
        """What it wrote to standard error, after its end."""
        assert self.nsenter.stderr
        return self.nsenter.stderr.read().decode()


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    needs.need_namespaces()
    needs.need_tool("sshd")
    folder = tmp_path_factory.mktemp("ssh")
    with hosts(["n1", "n2", "n3", "head"]) as (*nodes, head), sshd([*nodes], folder) as config:
        yield Machines(head, tuple(nodes), config)
