"""Find a run by its name or folder, and read what stands in its ``run.json``."""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KINDS = {"name": str, "job": str, "hosts": list, "world_size": int, "outcome": str, "start": str}


def find_run(run: str, runs: Path, verb: str, others: Callable[[], Iterable[Path]] = tuple) -> Path:
    """The folder of a run.

    Args:
        run: the folder, its ``run.json``, or the name of a run.
        runs: the folder of all runs.
        verb: what is to be typed again in the cure.
        others: gives folders of runs that are known from elsewhere, by their processes for instance.

    Raises:
        RunError: there is none, or the name fits several.

    """
    path = Path(run)
    if path.name == "run.json" and _holds(path.parent):
        return path.parent
    for folder in (path, runs / run):
        if run.strip() and _holds(folder):
            return folder
    known = sorted(set(others()))
    named = [folder for folder in known if folder.name == run]
    if len(named) == 1:
        return named[0]
    if named:
        raise RunError(
            f"{len(named)} runs are named {run}",
            evidence=[str(folder) for folder in named],
            cure=f"name the folder:  instep {verb} {named[0]}",
        )
    raise _unknown(run, runs, verb, known)


def _holds(folder: Path) -> bool:
    """Whether there is a record in it."""
    try:
        return (folder / "run.json").is_file()
    except OSError:  # a name longer than any file's
        return False


def _unknown(run: str, runs: Path, verb: str, others: list[Path]) -> RunError:
    with suppress(OSError):  # a name longer than any file's
        for path in (Path(run), runs / run):
            if run.strip() and path.is_dir():
                return RunError(
                    f"{path} is no run: there is no run.json in it", cure=f"see which runs there are:  ls -t {runs}"
                )
        if run and Path(run).is_file():
            return RunError(
                f"{run} is a file, and no run", cure=f"name the folder of a run:  instep {verb} {runs / 'NAME'}"
            )
    names = [*(folder.name for folder in others), *_names(runs)]
    asked = Path(run).name
    begun = [name for name in reversed(names) if asked and name.startswith(asked)]
    near = list(dict.fromkeys([*begun, *difflib.get_close_matches(asked, names, n=3)]))[:3]
    if near:
        cure = f"did you mean:  instep {verb} {near[0]}" + (f"   (or {', '.join(near[1:])})" if near[1:] else "")
    elif names:
        cure = f"the last run is:  instep {verb} {names[-1]}"
    else:
        cure = "name the folder of a run, or say where runs are kept with --runs DIR"
    looked = [f"looked for {Path(run).absolute()}", f"and in {runs.absolute()}"]
    return RunError(f"no such run: {run!r}", evidence=looked, cure=cure)


def _names(runs: Path) -> list[str]:
    """Of all runs there, the last one last."""
    try:
        found = [(one.stat().st_mtime, one.name) for one in runs.iterdir() if (one / "run.json").is_file()]
    except OSError:
        return []
    return [name for _, name in sorted(found)]


def read_record(folder: Path) -> dict[str, Any]:
    """What stands in the run's ``run.json``.

    Raises:
        RunError: it cannot be read, or is something else.

    """
    path = folder / "run.json"
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read", evidence=[str(error.strerror)]) from error
    except (ValueError, RecursionError) as error:
        raise _not_ours(path, str(error)) from error
    if not isinstance(values, dict):
        raise _not_ours(path, f"it holds a {type(values).__name__}")
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind):
            raise _not_ours(path, f"{name}: {values.get(name)!r}")
    return values


def _not_ours(path: Path, evidence: str) -> RunError:
    return RunError(
        f"{path} is not what instep writes",
        evidence=[evidence],
        cure=f"was it changed, or cut short? The logs are in {path.parent / 'log'}",
    )
