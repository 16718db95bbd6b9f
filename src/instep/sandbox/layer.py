"""What a machine has of its own, laid down as files over the image."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instep.sandbox import image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instep.sandbox.files import File
    from instep.sandbox.state import Machine, Sandbox


def lay(sandbox: Sandbox, machine: Machine, files: Mapping[str, File]) -> None:
    """Lay down a machine's own files, before its first start: in `upper` of its folder, as they lie over the image."""
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
