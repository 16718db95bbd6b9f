"""Which folders of this host every machine sees, at the same path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import instep
from instep.errors import RunError

# A machine has its own: to lay the host's over them would break it.
_OWN = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")


def collapse(rw: list[str], ro: list[str]) -> list[tuple[str, str]]:
    """The folders to show, without those that lie in another that is shown as well.

    Args:
        rw: those that may be written to.
        ro: those that need only be read.

    Returns:
        (path, ``rw`` or ``ro``), outer ones first. A writable folder in one that is not stays.

    """
    kept: list[tuple[str, str]] = []
    for path, how in sorted({**dict.fromkeys(ro, "ro"), **dict.fromkeys(rw, "rw")}.items()):
        above = [other for other, its in kept if path.startswith(f"{other}/") and (its == "rw" or how == "ro")]
        if not above:
            kept.append((path, how))
    return kept


def check_share(path: str) -> str:
    """The absolute path of a folder to share.

    Raises:
        RunError: it cannot be shared.

    """
    whole = os.path.abspath(path)  # noqa: PTH100  # links stay as they are: the same path is wanted everywhere
    if not Path(whole).is_dir():
        raise RunError(f"--share {path}: there is no such folder", evidence=[whole])
    if not can_share(whole):
        raise RunError(
            f"--share {path} would lay this host's {whole} over each machine's own",
            cure="share a folder of your work:  --share DIR",
        )
    return whole


def can_share(path: str) -> bool:
    """A machine does not need its own folder of that path."""
    return path not in _OWN and not path.startswith(("/dev/", "/proc/", "/sys/", "/etc/"))


def python_folders(release: str, own_release: str) -> list[str]:
    """What the Python that runs this needs: its environment, what that is based on, and where instep lies.

    Args:
        release: of the machines.
        own_release: of this host; empty where it is not Debian.

    """
    executable = Path(sys.executable).resolve()
    found = [sys.prefix, str(Path(instep.__file__).parents[1])]
    for prefix in (sys.base_prefix, str(executable.parents[1])):
        if prefix != "/usr":
            found.append(prefix)
        elif release != own_release:
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            found += [f"/usr/bin/{version}", f"/usr/lib/{version}", f"/usr/local/lib/{version}"]
    return [path for path in found if path != "/usr" and Path(path).exists()]


def python_link(release: str, own_release: str) -> str:
    """What ``python3`` has to mean on the machines, where theirs is another than the distribution's here."""
    if sys.base_prefix == "/usr" and release != own_release:
        return f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ""
