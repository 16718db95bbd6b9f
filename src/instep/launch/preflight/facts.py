"""What one machine says about itself before the job starts: plain values that travel as JSON."""

from __future__ import annotations

import getpass
import hashlib
import ipaddress
import os
import platform
import resource
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.launch.planning.machine import Machine, this_machine
from instep.launch.planning.target import Target, source_of
from instep.launch.preflight import shared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_FILES = 5000  # of the working folder that are compared where each machine has its own copy
_PACKAGES = ("torch", "instep", "numpy")
_NOT_CODE = {"runs", "node_modules", "__pycache__", "site-packages"}


def ask(
    target: Target, cwd: Path, runs: Path, *, token: shared.Token | None = None, code: bool = False
) -> dict[str, Any]:
    """The questions for all machines, as they are sent to their agents.

    Args:
        target: the program.
        cwd: the working folder of the ranks, the same path everywhere.
        runs: the folder of all runs.
        token: what shows whether `runs` is shared; None: not to be looked at.
        code: whether all Python files of the working folder are compared, not only the program's.

    """
    return {
        "target": [target.kind, target.name],
        "cwd": str(cwd.absolute()),
        "runs": str((cwd / runs).absolute()),
        "shared": token.asked() if token else None,
        "code": code,
    }


def gather(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Look at this machine; nothing of it raises, what cannot be told is None or has a reason.

    Args:
        asked: made by :func:`ask`.

    Returns:
        plain values: host, identity (equal for two names of one machine only), user, python, executable, torch, instep,
        numpy (versions, None where not installed), instep_at, instep_hash, cwd {path, there, writable}, script {path,
        hash, why}, code {file: hash} or None, free_bytes (for the runs folder), shared {read, wrote, why} or None,
        interfaces [[name, address, prefix length]] of those that are up, machine (see :func:`machine_of`), limits
        {memlock, nofile} in bytes and files (-1 is without limit), clock (seconds since 1970, when all else was done).

    """
    cwd = Path(asked["cwd"])
    kind, name = asked["target"]
    home = Path(__file__).parents[2]
    machine = this_machine(os.environ)
    found: dict[str, Any] = {
        "host": machine.host,
        "identity": _identity(),
        "user": _user(),
        "python": platform.python_version(),
        "executable": sys.executable,
        **{package: _version(package) for package in _PACKAGES},
        "instep_at": str(home),
        "instep_hash": _hash_folder(home),
        "cwd": {"path": str(cwd), "there": cwd.is_dir(), "writable": os.access(cwd, os.W_OK)},
        "script": _script(Target(kind, name), cwd),
        "code": _code(cwd) if asked.get("code") else None,
        "free_bytes": _free(Path(asked["runs"])),
        "shared": shared.look(asked["shared"]) if asked.get("shared") else None,
        "interfaces": interfaces(),
        "machine": [machine.host, machine.cores, machine.gpus, list(machine.ports), list(machine.ephemeral)],
        "limits": {
            "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        },
    }
    return {**found, "clock": time.time()}


def machine_of(facts: Mapping[str, Any]) -> Machine:
    """What a plan needs, from what the machine has said."""
    host, cores, gpus, (first, last), (low, high) = facts["machine"]
    return Machine(host, cores, gpus, (first, last), (low, high))


def interfaces() -> list[list[Any]]:
    """[name, address, prefix length] of all addresses of interfaces that are up, IPv4 first, in the kernel's order."""
    import psutil

    up = {name for name, entry in psutil.net_if_stats().items() if entry.isup}
    all_of_them = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    return [
        [name, entry.address.partition("%")[0], _prefix(entry.netmask)]
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, entry in all_of_them
        if name in up and entry.family == family
    ]


def _prefix(netmask: str | None) -> int | None:
    with suppress(ValueError, TypeError):
        return int(ipaddress.ip_address(netmask)).bit_count() if netmask else None
    return None


def _identity() -> str:
    """The same for two names of one machine only: clones share /etc/machine-id, containers the kernel."""
    boot = network = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with suppress(OSError):
        network = str(Path("/proc/self/ns/net").stat().st_ino)
    return f"{boot}/{network}/{socket.gethostname()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number that no table knows
        return str(os.getuid())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hash_folder(folder: Path) -> str:
    """One number for all Python files below."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\n{_hash(path)}\n".encode())
    return total.hexdigest()


def _hash(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _script(target: Target, cwd: Path) -> dict[str, Any]:
    try:
        path = source_of(target, cwd)
        return {"path": str(path), "hash": hashlib.sha256(path.read_bytes()).hexdigest(), "why": ""}
    except OSError as error:
        return {"path": str(cwd / target.name), "hash": None, "why": error.strerror or str(error)}


def _code(folder: Path) -> dict[str, str | None]:
    """The Python files of the working folder, each with its hash."""
    found: dict[str, str | None] = {}
    for path in _python_files(folder):
        found[str(path.relative_to(folder))] = _hash(path)
        if len(found) >= _MOST_FILES:
            break
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_CODE and not _is_environment(parent, name))
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def _is_environment(parent: str, name: str) -> bool:
    """A hidden folder, or a Python environment."""
    return name.startswith(".") or os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118


def _free(folder: Path) -> int | None:
    """Bytes that this user may still write there, or where the folder would be made."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            facts = os.statvfs(place)
            return facts.f_bavail * facts.f_frsize
    return None
