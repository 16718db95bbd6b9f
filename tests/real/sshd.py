"""A real sshd on machines of :mod:`tests.real.hosts`, with keys of its own: nothing of the user's is touched."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.real.hosts import Host

_SERVER = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
"""
_CLIENT = """
Host *
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""


@contextmanager
def sshd(members: Sequence[Host], folder: Path) -> Iterator[Path]:
    """Start them; they end with the machines, or here.

    Args:
        members: the machines.
        folder: for keys and configuration.

    Yields:
        The file for ``ssh -F``.

    """
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text("".join(f"{one.name},{one.addr} {' '.join(key)}\n" for one in members))
    (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    daemons = [
        subprocess.Popen(
            one.argv(["/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd_config"]),
            stdin=subprocess.DEVNULL,
            stderr=(folder / f"sshd-{one.name}.log").open("wb"),
        )
        for one in members
    ]
    try:
        for one in members:
            _wait_for(one, folder)
        yield folder / "ssh_config"
    finally:
        for daemon in daemons:
            daemon.kill()
        for daemon in daemons:
            daemon.wait()


def _wait_for(host: Host, folder: Path) -> None:
    deadline = time.monotonic() + 10
    while "Server listening" not in (log := (folder / f"sshd-{host.name}.log").read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.02)
