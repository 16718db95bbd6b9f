"""Machines as containers: a booted Debian each, on a layer of its own over the image."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox import image, network, processes
from instep.sandbox.state import MARKER, Process, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.sandbox.files import File
    from instep.sandbox.state import Machine, Sandbox, User

CARRY = Path(__file__).with_name("carry.sh")
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def prepare(sandbox: Sandbox, machine: Machine, files: Mapping[str, File]) -> None:
    """Lay down a machine's own files, before its first start."""
    place = sandbox.place(machine)
    for name in ("upper", "work", "root"):
        (place / name).mkdir(parents=True)
    upper = place / "upper"
    upper.chmod(0o755)
    _homes(sandbox, upper)
    for path, file in files.items():
        target = Path(f"{upper}{path}")
        _parents(target.parent, upper, image.root_of(sandbox.image))
        if file.link:
            target.symlink_to(file.link)
            continue
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(file.text)
            os.fchown(out.fileno(), file.uid, file.gid)
            os.fchmod(out.fileno(), file.mode)


def _parents(folder: Path, upper: Path, lower: Path) -> None:
    """Make a folder of the layer as it is in the image: what the layer says of a folder is what holds."""
    if folder == upper or folder.exists():
        return
    _parents(folder.parent, upper, lower)
    folder.mkdir(mode=0o755)
    with suppress(FileNotFoundError):
        there = (lower / folder.relative_to(upper)).stat()
        os.chown(folder, there.st_uid, there.st_gid)
        folder.chmod(there.st_mode & 0o7777)


def _homes(sandbox: Sandbox, upper: Path) -> None:
    """The user's home; and root's is open where others must pass through it to what all machines see."""
    user = sandbox.user
    if user.uid != 0:
        home = Path(f"{upper}{user.home}")
        home.mkdir(parents=True, exist_ok=True)
        os.chown(home, user.uid, user.gid)
    if any(path.startswith("/root/") for path, _ in sandbox.mounts):
        (upper / "root").mkdir(mode=0o755)
        (upper / "root").chmod(0o755)


def start(sandbox: Sandbox, machine: Machine) -> Process:
    """Switch a machine on.

    Returns:
        the process that carries it, which outlives this one.

    Raises:
        RunError: it could not be started.

    """
    place = sandbox.place(machine)
    space = ["unshare", "--mount", "--net", "--propagation", "private"]
    carry = ["sh", str(CARRY), str(image.root_of(sandbox.image)), str(place), _cgroup(sandbox, machine)]
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


def _cgroup(sandbox: Sandbox, machine: Machine) -> str:
    return f"instep.{sandbox.name}.{machine.name}"


def kill(sandbox: Sandbox, machine: Machine) -> None:
    """Take a machine's power away: its cable first, so that no word of its end gets out."""
    network.unwire(sandbox, machine)
    processes.end(sandbox.place(machine))
    remove_cgroups(_cgroup(sandbox, machine))


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


def enter(sandbox: Sandbox, machine: Machine, argv: Sequence[str], user: str = "root") -> list[str]:
    """The command line that runs a command on a machine, without its network.

    It starts in the current folder if the machine has it, and in the user's home otherwise.

    Raises:
        RunError: the machine is off, or the user is not known there.

    """
    carrier = sandbox.running.get(machine.name)
    pid = processes.leader(carrier) if carrier else None
    if pid is None:
        raise RunError(f"{machine.name} is off", cure=f"instep sandbox start{option(sandbox)} {machine.name}")
    people = {"root": ("0", "0", "/root"), sandbox.user.name: _ids(sandbox.user)}
    if user not in people:
        raise RunError(f"there is no user {user!r} on {machine.name}", cure=f"one of: {', '.join(sorted(people))}")
    uid, gid, home = people[user]
    into = ["nsenter", "--target", str(pid), "--all", "--"]
    where = [f"PATH={_PATH}", f"HOME={home}", f"USER={user}", f"LOGNAME={user}", "LANG=C.UTF-8", "SHELL=/bin/bash"]
    if os.environ.get("TERM"):
        where.append(f"TERM={os.environ['TERM']}")
    whose = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--"]
    script = 'cd -- "$1" 2>/dev/null || cd; shift; exec "$@"'
    return [*into, "env", "-i", *where, *whose, "sh", "-c", script, "sh", os.getcwd(), *argv]  # noqa: PTH109


def _ids(user: User) -> tuple[str, str, str]:
    return str(user.uid), str(user.gid), user.home
