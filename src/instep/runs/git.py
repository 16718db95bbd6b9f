"""Which code was it? The commit, and what differs from it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LIMIT_S = 20  # a status on a slow network file system takes long; the run does not wait for ever
_MAX_UNTRACKED = 100


@dataclass(frozen=True)
class GitFacts:
    """The state of the repository that holds the script.

    Attributes:
        root: the repository's top folder.
        commit: the full name of HEAD, empty in a repository without a commit.
        branch: empty where HEAD is detached.
        dirty: tracked files differ from the commit, or there are untracked ones.
        untracked: their names, at most 100.
        patch: ``git diff HEAD --binary``; kept beside run.json, not in it.

    """

    root: str
    commit: str
    branch: str
    dirty: bool
    untracked: tuple[str, ...] = ()
    patch: bytes = field(default=b"", repr=False)

    def as_json(self) -> dict[str, Any]:
        """All but the patch."""
        values = asdict(self)
        del values["patch"]
        return values


def git_facts(folder: Path, *, exclude: Path | None = None) -> GitFacts | None:
    """Look at the repository around `folder`; None where there is none, or no git.

    Args:
        folder: where the script lies.
        exclude: a folder whose untracked files do not count (the runs folder).

    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return None
    top = Path(os.fsdecode(root.strip()))
    commit = (_git(top, "rev-parse", "--verify", "--quiet", "HEAD") or b"").decode().strip()
    branch = (_git(top, "symbolic-ref", "--quiet", "--short", "HEAD") or b"").decode().strip()
    patch = (_git(top, "diff", "--binary", "HEAD") or b"") if commit else b""
    listed = _git(top, "ls-files", "--others", "--exclude-standard", "--directory", "-z") or b""
    skip = os.path.relpath(exclude, top) if exclude else ""
    names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    untracked = tuple(name for name in names if name.rstrip("/") != skip and not name.startswith(f"{skip}/"))
    return GitFacts(str(top), commit, branch, bool(patch or untracked), untracked[:_MAX_UNTRACKED], patch)


def _git(folder: Path, *words: str) -> bytes | None:
    """What git prints, or None where it fails, is missing or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # never in the way of a git the user types
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
