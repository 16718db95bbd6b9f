"""The manifest of a checkpoint: its last file, without which it is none, and the list by which it is verified."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from instep.errors import CheckpointError
from instep.train.checkpoints.files import Written, checksum, write_new

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

NAME = "manifest.json"
FORMAT, VERSION = "instep checkpoint", 1
OURS = ("format", "format_version", "step", "world_size", "serial", "versions", "files", "checksum")


class Unfit(Exception):  # noqa: N818  # a verdict, not an error: another checkpoint is tried
    """Why a folder is no whole checkpoint."""


def make(
    given: Mapping[str, Any], *, step: int, world_size: int, serial: int, files: Mapping[str, Written]
) -> dict[str, Any]:
    """The manifest: what the caller gave, and what verifies the checkpoint.

    Args:
        given: anything that JSON takes.
        step: optimizer updates done.
        world_size: the ranks that wrote it.
        serial: the how-many-th checkpoint of its folder; the newest is the one with the highest.
        files: all files of the checkpoint, by name.

    """
    manifest = json.loads(json.dumps(dict(given)))
    manifest |= {"format": FORMAT, "format_version": VERSION, "step": step, "world_size": world_size, "serial": serial}
    manifest["versions"] = _versions()
    manifest["files"] = {
        name: {"bytes": files[name].size, "crc32": f"{files[name].crc32:08x}"} for name in sorted(files)
    }
    manifest["checksum"] = _own_checksum(manifest)
    return dict(manifest)


def check_given(given: Mapping[str, Any]) -> str:
    """What is wrong with what the caller wants in the manifest; empty if nothing is."""
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError, RecursionError) as error:
        return f"manifest: {error}"
    return ""


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, to the disk."""
    write_new(folder / NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        Unfit: there is none, or it is not one of ours, or it is damaged.

    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Unfit(f"no {NAME}: not finished, or written by another program") from None
    except OSError as error:
        raise Unfit(f"{NAME} cannot be read: {error.strerror}") from None
    try:
        manifest = json.loads(text)
    except ValueError:
        raise Unfit(f"{NAME} is no JSON: torn or corrupt") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Unfit(f"{NAME} is of another program")
    if manifest.get("format_version") != VERSION:
        raise Unfit(f"written in format version {manifest.get('format_version')}; this instep reads version {VERSION}")
    if manifest.get("checksum") != _own_checksum(manifest):
        raise Unfit(f"{NAME} is corrupt: its own checksum does not fit")
    return manifest


def wrong_sizes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files that are not there, or have another size than when they were written."""
    wrong = []
    for name, file in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if size != file["bytes"]:
            wrong.append(f"{name} has {size} bytes, not {file['bytes']}")
    return wrong


def corrupt(folder: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Which of these files do not hold what was written into them. Reads them whole."""
    wrong = []
    for name in names:
        try:
            sound = f"{checksum(folder / name):08x}" == manifest["files"][name]["crc32"]
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error.strerror}")
            continue
        if not sound:
            wrong.append(f"{name} is corrupt: its checksum does not fit")
    return wrong


def refuse_given(problem: str) -> CheckpointError:
    """The error for a manifest that JSON does not take."""
    return CheckpointError(
        "The manifest of a checkpoint has to be plain JSON. Nothing was written.",
        evidence=[problem],
        cure="Give numbers, strings, None, and lists and dicts of them.",
    )


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    import torch

    try:
        ours = metadata.version("instep")
    except metadata.PackageNotFoundError:  # a source tree that was not installed
        ours = "unknown"
    return {"instep": ours, "torch": torch.__version__, "python": platform.python_version()}
