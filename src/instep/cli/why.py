"""``instep why``: which rank left the common path, told again from the run folder or from flight-recorder dumps."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.errors import InstepError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS_OF_A_FAILURE = 20


@dataclass(frozen=True)
class Answer:
    """What there is to say.

    Attributes:
        values: for ``--json``.
        text: for people.

    """

    values: dict[str, Any]
    text: str


def why_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, its name, or a folder of flight-recorder dumps.")
    ],
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are kept.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
) -> None:
    """Tell why the ranks of RUN were out of step: which rank, at which line; or how RUN ended.

    RUN may also be a folder of dumps of torch's flight recorder, one file a rank, of a job that instep did not start.
    """
    try:
        answer = _answer(_folder(run, runs))
    except InstepError as error:
        if as_json:
            said = {"what": error.what, "evidence": list(error.evidence), "cure": error.cure}
            print(json.dumps({"error": said}, indent=2), flush=True)
        raise
    print(json.dumps(answer.values, indent=2) if as_json else answer.text, flush=True)


def _folder(run: str, runs: Path) -> Path:
    """The folder that is meant.

    Raises:
        RunError: there is none.

    """
    for path in (Path(run), runs / run):
        if run and path.is_dir():
            return path
    path = Path(run)
    if path.is_file():
        if path.name in {"run.json", "desync.json"}:
            return path.parent
        raise RunError(
            f"{run} is a file, and no run",
            evidence=["what is asked for is a folder: runs/NAME, or one with a dump of each rank"],
            cure=f"the folder that it lies in:  instep why {path.parent}",
        )
    try:
        names = sorted((one for one in runs.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
    except OSError:
        names = []
    near = difflib.get_close_matches(run, [one.name for one in names], n=3)
    if near:
        cure = f"did you mean:  instep why {runs / near[0]}"
    elif names:
        cure = f"the last run is:  instep why {names[-1]}"
    else:
        cure = "name the folder of a run, or say where runs are kept with --runs DIR"
    raise RunError(
        f"no such run: {run!r}", evidence=[f"looked for {path.absolute()}", f"and in {runs.absolute()}"], cure=cure
    )


def _answer(folder: Path) -> Answer:
    if (folder / "desync.json").exists():
        return _desync(folder)
    if (folder / "run.json").exists():
        return _end(folder)
    return _dumps(folder)


def _desync(folder: Path) -> Answer:
    from instep.guard import report

    values = _read(folder / "desync.json")

    def told() -> str:
        texts = [report.text(*report.from_json(one)) for one in [values, *values.get("others", [])]]
        ending = _ending(_read(folder / "run.json")) if (folder / "run.json").exists() else "how it ended is not known"
        stacks = f" · stacks of all ranks: {folder / 'stacks'}" if (folder / "stacks").is_dir() else ""
        return "\n".join([*texts, f"  {ending}{stacks}"])

    return Answer(values, _understood(folder / "desync.json", told))


def _end(folder: Path) -> Answer:
    """A run whose ranks were in step, as far as anybody saw."""
    record = _read(folder / "run.json")

    def told() -> str:
        lines = [f"no ranks out of step were seen in {folder.name}", f"  {_ending(record)}"]
        failure = record.get("first_failure")
        if failure:
            lines += _failure(failure, folder)
        return "\n".join(lines)

    names = ("outcome", "exit_code", "exit_codes", "first_failure")
    text = _understood(folder / "run.json", told)
    return Answer({"kind": None, **{name: record.get(name) for name in names}}, text)


def _ending(record: dict[str, Any]) -> str:
    if record["outcome"] == "running":
        return f"its launcher (pid {record['pid']}) has not written an end: it still runs, or was killed"
    return f"{record['outcome']} after {record['seconds']:.1f} s (exit code {record['exit_code']})"


def _failure(failure: dict[str, Any], folder: Path) -> list[str]:
    if failure.get("rank") is None:
        return [f"  {line}" for line in str(failure["message"]).splitlines()]
    from instep.launch.running.failure import Event, details, headline

    event = Event(**{name: value for name, value in failure.items() if name != "host"})
    lines = [headline(event, failure["host"]), *details(event)[-_WORDS_OF_A_FAILURE:]]
    return [f"  {line}" for line in [*lines, f"its output: {folder / 'log' / f'rank-{event.rank}.txt'}"]]


def _dumps(folder: Path) -> Answer:
    from instep.guard import dumps, report
    from instep.guard.verdict import judge

    if not dumps.find(folder):
        raise RunError(
            f"{folder} is neither a run nor a folder of dumps",
            evidence=["there is no run.json in it", "and no file named after a rank, such as trace_rank_0"],
            cure="name a folder of runs/, or one with a flight-recorder dump of each rank",
        )
    views = dumps.read(folder)
    verdict = judge(views)
    if verdict is None:
        ranks = report.rank_words(view.rank for view in views)
        return Answer({"kind": None}, f"the dumps of {ranks} do not say that they are out of step")
    return Answer(report.as_json(verdict, None), report.text(verdict, end="from dumps of torch's flight recorder"))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RunError: it is something else.

    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read", evidence=[str(error.strerror)]) from error
    except ValueError as error:
        raise _not_ours(path, str(error)) from error
    if not isinstance(values, dict):
        raise _not_ours(path, f"it holds a {type(values).__name__}")
    return values


def _understood(path: Path, tell: Callable[[], str]) -> str:
    try:
        return tell()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_ours(path, f"{type(error).__name__}: {error}") from error


def _not_ours(path: Path, evidence: str) -> RunError:
    return RunError(
        f"{path} is not what instep writes",
        evidence=[evidence],
        cure=f"was it changed, or cut short? The logs are in {path.parent / 'log'}",
    )
