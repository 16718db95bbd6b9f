"""What a test needs of the machine. On CI (`CI` is set) what is missing is a failure, elsewhere a skip that says why."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

# The tool -> the Debian package that brings it. `python -m tests.needs` prints the packages that are missing.
TOOLS = {
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "mpiexec.mpich": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "munged": "munge",
    "nft": "nftables",
    "nsenter": "util-linux",
    "rsync": "rsync",
    "scontrol": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "systemd-nspawn": "systemd-container",
    "tc": "iproute2",
}
SANDBOX = ("debootstrap", "ip", "nft", "nsenter", "ssh", "systemd-nspawn", "tc")
# A library that is loaded by name: srun --mpi=pmix.
LIBRARIES = {"libpmix.so": "libpmix-dev"}
NAMESPACES = [
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--mount-proc",
    "mount",
    "-t",
    "sysfs",
    "sysfs",
    "/sys",
]


def need_tool(*names: str) -> None:
    """The test runs only where these programs are."""
    if missing := [name for name in names if shutil.which(name) is None]:
        packages = " ".join(sorted({TOOLS.get(name, name) for name in missing}))
        _lack(f"not installed: {', '.join(missing)} (apt-get install {packages})")


def need_vision() -> Path:
    """The commands of .venv-vision: torchvision, other trainers, another torch than the tests; only where it was made."""
    commands = Path(__file__).parents[1] / ".venv-vision" / "bin"
    if not all((commands / name).exists() for name in ("instep", "accelerate")):  # an older one has no other trainers
        _lack("there is no .venv-vision, or not with all that belongs in it (make vision)")
    return commands


def need_root() -> None:
    """The test runs only as root."""
    if os.geteuid() != 0:
        _lack("needs root")


def need_namespaces() -> None:
    """The test runs only where this process may make namespaces."""
    need_root()
    need_tool("unshare", "nsenter", "ip")
    if error := _namespaces():
        _lack(f"this machine does not let root make namespaces: {error}")


def need_sandbox() -> None:
    """The test runs only where `instep sandbox` can make machines."""
    need_namespaces()
    need_tool(*SANDBOX)


@functools.cache
def _namespaces() -> str:
    done = subprocess.run(NAMESPACES, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _lack(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def missing_packages() -> list[str]:
    """The Debian packages that the tests want and this machine lacks."""
    tools = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return sorted(tools | {package for name, package in LIBRARIES.items() if not _loads(name)})


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*missing_packages())
