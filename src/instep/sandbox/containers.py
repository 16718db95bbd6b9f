"""Machines as containers: a booted Debian each, on a layer of its own over the image."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instep.sandbox import image, network, processes
from instep.sandbox.state import MARKER, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.sandbox.state import Machine, Sandbox, User

CARRY = Path(__file__).with_name("carry.sh")
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))
# Begins in the folder that is named first if the machine has it, and in the user's home otherwise.
FROM_HERE = 'cd -- "$1" 2>/dev/null || cd; shift; exec "$@"'
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def start(sandbox: Sandbox, machine: Machine) -> Process:
    """Switch a machine on.

    Returns:
        the process that carries it, which outlives this one.

    Raises:
        RunError: it could not be started.

    """
    place = sandbox.place(machine)
    space = ["unshare", "--mount", "--net", "--propagation", "private"]
    carry = ["sh", str(CARRY), str(image.root_of(sandbox.image)), str(place), cgroup(sandbox, machine)]
    with (place / "console.log").open("ab") as console:
        process = subprocess.Popen(
            [*space, *carry, *_nspawn(sandbox, machine)],
            stdin=subprocess.PIPE,
            stdout=console,
            stderr=console,
            env={"PATH": os.environ.get("PATH", os.defpath), MARKER: str(place), "LC_ALL": "C.UTF-8"}
            | {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"},
            start_new_session=True,
            cwd="/",
        )
    assert process.stdin is not None
    with process.stdin:
        network.await_space(process)  # and a mount namespace: unshare takes both at once
        network.wire(sandbox, machine, process.pid)
        started = processes.start_of(process.pid)
        with suppress(BrokenPipeError):
            process.stdin.write(b"go\n")
            process.stdin.flush()
    process.returncode = 0  # it is a daemon from now on: nobody waits for it
    return Process(process.pid, started or 0)


def _nspawn(sandbox: Sandbox, machine: Machine) -> list[str]:
    words = ["--quiet", "--boot", "--register=no", f"--directory={sandbox.place(machine) / 'root'}"]
    if not Path("/run/systemd/system").is_dir():
        words.append("--keep-unit")
    words += [f"--machine={sandbox.name}-{machine.name}", f"--hostname={machine.name}", "--console=read-only"]
    words += ["--resolv-conf=off", "--timezone=off", "--link-journal=no", "--capability=CAP_NET_ADMIN"]
    words.append(f"--bind={_escaped(str(sandbox.shared))}:/shared")
    for path, how in [(str(sandbox.shared), "rw"), *sandbox.mounts]:
        words.append(f"--bind{'' if how == 'rw' else '-ro'}={_escaped(path)}:{_escaped(path)}")
    if sandbox.disk:
        words.append(f"--tmpfs=/scratch:mode=1777,size={sandbox.disk}")
    return words


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:")


def cgroup(sandbox: Sandbox, machine: Machine) -> str:
    """The name of a machine's branch of the cgroups."""
    return f"instep.{sandbox.name}.{machine.name}"


def remove_cgroups(pattern: str) -> None:
    """Remove the branches of the cgroups that machines had, and wait for the last of their processes to leave."""
    deadline = time.monotonic() + 5
    for tree in CGROUPS:
        for branch in tree.glob(pattern):
            while branch.exists() and time.monotonic() < deadline:
                for folder, _, _ in os.walk(branch, topdown=False):
                    with suppress(OSError):
                        Path(folder).rmdir()
                time.sleep(0.005)


def enter(sandbox: Sandbox, machine: Machine, argv: Sequence[str], user: User) -> list[str] | None:
    """The command line that runs a command on a machine, without its network; None if the machine is off."""
    pid = processes.leader(sandbox.running[machine.name])
    if pid is None:
        return None
    into = ["nsenter", "--target", str(pid), "--all", "--"]
    names = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": "/bin/bash"}
    names |= {"PATH": _PATH, "LANG": "C.UTF-8"}
    if "TERM" in os.environ:
        names["TERM"] = os.environ["TERM"]
    whose = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--init-groups", "--"]
    environment = [f"{key}={value}" for key, value in names.items()]
    return [*into, "env", "-i", *environment, *whose, "sh", "-c", FROM_HERE, "sh", os.getcwd(), *argv]  # noqa: PTH109
