"""What this host must have before it can carry a sandbox."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

from instep.errors import RunError
from instep.sandbox.image import own_release
from instep.sandbox.vms import server_path

# The tool -> the Debian package that brings it.
TOOLS = {
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "systemd-nspawn": "systemd-container",
    "tc": "iproute2",
    "unshare": "util-linux",
}
VM_TOOLS = {"mke2fs": "e2fsprogs", "qemu-img": "qemu-utils", "qemu-system-x86_64": "qemu-system-x86", "tar": "tar"}


def check(*, vms: bool = False) -> None:
    """See that a sandbox can be made here.

    Raises:
        RunError: this is not root, or packages are missing; all that is wrong at once.

    """
    tools = TOOLS | (VM_TOOLS if vms else {})
    missing = [tool for tool in tools if shutil.which(tool) is None]
    packages = {tools[tool] for tool in missing}
    if vms and server_path() is None:
        missing.append("virtiofsd")
        packages.add("qemu-system-common" if own_release() == "bookworm" else "virtiofsd")
    evidence, cures = [], []
    if missing:
        evidence.append(f"not installed: {', '.join(missing)}")
        sudo = "" if os.geteuid() == 0 else "sudo "
        cures.append(f"{sudo}apt-get install --no-install-recommends {' '.join(sorted(packages))}")
    if os.geteuid() != 0:
        evidence.append(f"only root makes machines and networks; this is uid {os.geteuid()}")
        cures.append(as_root())
    if evidence:
        raise RunError("this host cannot carry a sandbox as things are", evidence=evidence, cure="\n".join(cures))


def check_root() -> None:
    """See that this is root.

    Raises:
        RunError: it is not.

    """
    if os.geteuid() != 0:
        raise RunError("only root may do this to a sandbox", evidence=[f"this is uid {os.geteuid()}"], cure=as_root())


def as_root() -> str:
    """The command that was typed, for root."""
    program = shutil.which(sys.argv[0]) or sys.argv[0]  # sudo has a PATH of its own
    return f"sudo {shlex.join([os.path.abspath(program), *sys.argv[1:]])}"  # noqa: PTH100  # links stay as they are
