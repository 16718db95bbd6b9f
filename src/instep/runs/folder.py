"""The run folder ``runs/NAME/``: its name, and making it without ever taking another run's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

_MAX_NAME = 200  # file systems allow 255 bytes; log collectors and editors append to names


def default_name(stem: str, when: datetime) -> str:
    """``STEM-YYYYmmdd-HHMMSS``, with what does not belong in a file name replaced."""
    clean = re.sub(r"[^\w.+-]+", "-", stem).strip("-.") or "run"
    return f"{clean[:100]}-{when:%Y%m%d-%H%M%S}"


def check_name(name: str) -> str:
    """Return a name given by a user.

    Raises:
        RunError: it cannot be the name of one folder.

    """
    if not name or name in {".", ".."} or "/" in name or not name.isprintable() or len(name.encode()) > _MAX_NAME:
        raise RunError(
            f"{name!r} cannot be the name of a run",
            evidence=[f"a name is one folder inside runs/: no '/', not '.' or '..', 1 to {_MAX_NAME} bytes"],
            cure="leave out --name, or choose one such as --name resnet-lr3",
        )
    return name


def create_folder(runs: Path, name: str | None, default: str) -> Path:
    """Make ``runs/NAME/`` with its ``log/`` inside, and return its absolute path.

    Args:
        runs: the folder of all runs, made if it is missing.
        name: as given by the user; it must be new.
        default: taken where no name is given; a number is appended until it is new.

    Raises:
        RunError: the name is bad or taken, or the folder cannot be made.

    """
    if name is not None:
        check_name(name)
    runs = Path(os.path.abspath(runs))  # noqa: PTH100  # resolve() would follow the user's symbolic links
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = _make_new(runs, name or default, numbered=name is None)
        (folder / "log").mkdir()
    except OSError as error:
        raise RunError(
            f"the runs folder {runs} cannot be written",
            evidence=[f"{error.strerror}: {error.filename}"],
            cure="choose another one with --runs DIR",
        ) from error
    return folder


def _make_new(runs: Path, name: str, *, numbered: bool) -> Path:
    """Make a folder that did not exist: mkdir is what decides between two runs that start together."""
    folder = runs / name
    number = 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError as error:
            if not numbered:
                raise RunError(
                    f"there is a run named {name} already",
                    evidence=[f"{folder} exists; instep never writes over a run"],
                    cure=f"choose another --name, or remove it: rm -r {folder}",
                ) from error
            number += 1
            folder = runs / f"{name}-{number}"
        else:
            return folder


def current_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the run that this process belongs to: what ``instep run`` tells its ranks; None without it."""
    name = environ.get("INSTEP_RUN")
    return Path(name) if name else None
