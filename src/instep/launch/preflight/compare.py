"""Are the machines alike? What they have said about themselves, side by side. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SKEW_NOTE_S = 2.0
_SKEW_ERROR_S = 60.0
_LITTLE_DISK = 1 << 30
_FEW_FILES = 4096
_LITTLE_MEMLOCK = 64 << 20
_WIDE = 110  # characters of a table with a column for each machine; above, a line for each
_ODD = " ✗"
_ABSENT = "absent"  # in the place of a hash: a file that is not there
_SHARE = """\
run in a folder that all machines share; or let instep copy the code:  --sync
or, if each machine has its own copy of the code, and you know that they are alike:  --own-copies"""


@dataclass(frozen=True)
class Answer:
    """What a machine has said.

    Attributes:
        host: as the user named it.
        facts: see :func:`instep.launch.preflight.facts.gather`.
        asked_at: seconds since 1970 by the launcher's clock, when it asked.
        received_at: when the answer had come; 0: the clocks are not to be compared.
        folder: what is wrong with its view of the shared folder, see :meth:`instep.launch.preflight.shared.Token.seen`.

    """

    host: str
    facts: Mapping[str, Any]
    asked_at: float = 0.0
    received_at: float = 0.0
    folder: str = ""

    @property
    def skew(self) -> float:
        """Seconds that this clock is ahead of the launcher's at least: how long the answer took is not known."""
        if not self.received_at:
            return 0.0
        clock = self.facts["clock"]
        least, most = clock - self.received_at, clock - self.asked_at
        return float(least if least > 0 else min(most, 0.0))


@dataclass(frozen=True)
class _Row:
    """One fact of all machines.

    Attributes:
        name: of the fact.
        cells: what each machine has.
        odd: which of them are wrong.
        cure: what mends it.

    """

    name: str
    cells: list[str]
    odd: list[bool]
    cure: str


def check(
    answers: Sequence[Answer], here: Mapping[str, Any], *, own_copies: bool = False, to_be_copied: bool = False
) -> list[str]:
    """See whether these machines can run one job.

    Args:
        answers: of all machines, the main one first.
        here: the launcher's own facts, gathered with the same question: its script and its instep are the right ones.
        own_copies: the user says that each machine has its own copy of the folder.
        to_be_copied: the folder will be copied there first: what it holds now does not matter.

    Returns:
        lines on differences that do not hinder, "" free.

    Raises:
        RunError: a table of all differences that do, and what mends each.

    """
    _no_machine_twice(answers)
    rows = [row for row in _rows(answers, here, own_copies=own_copies, to_be_copied=to_be_copied) if any(row.odd)]
    if rows:
        raise _error(rows, [answer.host for answer in answers])
    return _notes(answers)


def _no_machine_twice(answers: Sequence[Answer]) -> None:
    seen: dict[str, str] = {}
    for answer in answers:
        first = seen.setdefault(answer.facts["identity"], answer.host)
        if first != answer.host:
            raise RunError(
                f"{first} and {answer.host} are the same machine",
                evidence=[f"both say: host name {answer.facts['host']}, {_addresses(answer.facts)}"],
                cure=f"name it once, with the slots of both:  --hosts {first}:N",
            )


def _addresses(facts: Mapping[str, Any]) -> str:
    found = [address for name, address, _ in facts["interfaces"] if name != "lo"]
    return ", ".join(found) or "no address but the loopback"


# ---- what has to be alike


def _rows(answers: Sequence[Answer], here: Mapping[str, Any], *, own_copies: bool, to_be_copied: bool) -> list[_Row]:
    facts = [answer.facts for answer in answers]
    hosts = [answer.host for answer in answers]
    rows = [_python(facts, hosts), _torch(facts, hosts), _instep(facts, hosts, here), _clock(answers)]
    if to_be_copied:
        return rows
    rows += [_folder(facts, hosts), _script(facts, hosts, here)]
    return [*rows, _code(facts, hosts, here) if own_copies else _shared(answers)]


def _usual(values: Sequence[Any]) -> Any:
    """What most machines have; of equals what the first has."""
    return Counter(values).most_common(1)[0][0]


def _on(hosts: Sequence[str], odd: Sequence[bool]) -> str:
    names = [host for host, is_odd in zip(hosts, odd, strict=True) if is_odd]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _python(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> _Row:
    minors = [".".join(one["python"].split(".")[:2]) for one in facts]
    usual = _usual(minors)
    odd = [minor != usual for minor in minors]
    cells = [f"{one['python']} {one['executable']}" if any(odd) else one["python"] for one in facts]
    cure = f"on {_on(hosts, odd)}: make an environment with Python {usual}, at one path for all, and name it:"
    cure += "  --python PATH"
    return _Row("python", cells, odd, cure)


def _torch(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> _Row:
    versions = [one["torch"] or "not installed" for one in facts]
    usual = _usual([version for version in versions if version != "not installed"] or versions)
    odd = [version != usual for version in versions]
    return _Row("torch", versions, odd, _install(facts, hosts, odd, f"torch=={usual}"))


def _install(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str], odd: Sequence[bool], what: str) -> str:
    python = next((one["executable"] for one, is_odd in zip(facts, odd, strict=True) if is_odd), "python")
    local = "      (from the index that the others have it from)" if "+" in what else ""
    return f"on {_on(hosts, odd)}:  {shlex.quote(python)} -m pip install {shlex.quote(what)}{local}"


def _instep(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str], here: Mapping[str, Any]) -> _Row:
    odd = [one["instep_hash"] != here["instep_hash"] for one in facts]
    cells = [f"{one['instep']} ({_short(one['instep_hash'])}) {one['instep_at']}" for one in facts]
    cure = _install(facts, hosts, odd, f"instep=={here['instep']}")
    if any(one["instep"] == here["instep"] for one, is_odd in zip(facts, odd, strict=True) if is_odd):
        cure += f"\nthe same version with other contents: bring there what is here, in {here['instep_at']}"
    here_cell = f"here: {here['instep']} ({_short(here['instep_hash'])})"
    return _Row("instep", cells, odd, f"{cure}\n({here_cell})")


def _folder(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> _Row:
    odd = [not one["cwd"]["there"] for one in facts]
    cells = ["missing" if is_odd else "there" for is_odd in odd]
    path = facts[0]["cwd"]["path"]
    return _Row("folder", cells, odd, f"on {_on(hosts, odd)} there is no {path}\n{_SHARE}")


def _script(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str], here: Mapping[str, Any]) -> _Row:
    right = here["script"]["hash"]
    odd = [one["script"]["hash"] != right for one in facts]
    cells = [_short(one["script"]["hash"]) or one["script"]["why"] for one in facts]
    path = here["script"]["path"]
    missing = [
        is_odd and one["script"]["hash"] is None and one["cwd"]["there"] for one, is_odd in zip(facts, odd, strict=True)
    ]
    other = [is_odd and one["script"]["hash"] is not None for one, is_odd in zip(facts, odd, strict=True)]
    cure = f"on {_on(hosts, missing)} there is no {path}\n" if any(missing) else ""
    cure += f"on {_on(hosts, other)} {path} is another one than here ({_short(right)})\n" if any(other) else ""
    return _Row("script", cells, odd, cure + _SHARE)


def _short(digest: str | None) -> str:
    return (digest or "")[:8]


def _clock(answers: Sequence[Answer]) -> _Row:
    odd = [abs(answer.skew) > _SKEW_ERROR_S for answer in answers]
    cells = [f"{answer.skew:+.0f} s" for answer in answers]
    hosts = [answer.host for answer in answers]
    cure = (
        f"set the clock of {_on(hosts, odd)} and keep it right:  sudo apt-get install chrony && sudo chronyc makestep"
    )
    return _Row("clock", cells, odd, cure)


def _shared(answers: Sequence[Answer]) -> _Row:
    odd = [bool(answer.folder) for answer in answers]
    cells = [answer.folder or "shared" for answer in answers]
    return _Row("runs folder", cells, odd, _SHARE)


def _code(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str], here: Mapping[str, Any]) -> _Row:
    right: Mapping[str, str | None] = here["code"] or {}
    codes: list[Mapping[str, str | None]] = [one["code"] or {} for one in facts]
    differing = [
        sorted(name for name in {*right, *code} if code.get(name, _ABSENT) != right.get(name, _ABSENT))
        for code in codes
    ]
    cells = [f"{len(names)} differ" if names else "as here" for names in differing]
    names = list(dict.fromkeys(name for each in differing for name in each))
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    odd = [bool(each) for each in differing]
    cure = f"on {_on(hosts, odd)} these files are others than here: {some}\nlet instep copy them:  --sync"
    return _Row("code", cells, odd, cure)


# ---- how it is said


def _error(rows: Sequence[_Row], hosts: Sequence[str]) -> RunError:
    cells = [[cell + (_ODD if odd else "") for cell, odd in zip(row.cells, row.odd, strict=True)] for row in rows]
    columns = [["", *hosts], *([row.name, *line] for row, line in zip(rows, cells, strict=True))]
    wide = table(columns)
    if max(len(line) for line in wide) > _WIDE:
        wide = table(_only_odd(rows, columns))
    cures = dict.fromkeys(line for row in rows for line in row.cure.splitlines())
    return RunError("the machines are not alike", evidence=wide, cure="\n".join(cures))


def _only_odd(rows: Sequence[_Row], columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """A line for each machine that has something wrong, after one that is right in all, if there is one."""
    lines = [list(line) for line in zip(*columns, strict=True)]
    wrong = [any(row.odd[number] for row in rows) for number in range(len(lines) - 1)]
    right = [line for line, is_wrong in zip(lines[1:], wrong, strict=True) if not is_wrong]
    if len(right) > 1:
        right = [[f"{right[0][0]} and {len(right) - 1} more", *right[0][1:]]]
    return [lines[0], *right, *(line for line, is_wrong in zip(lines[1:], wrong, strict=True) if is_wrong)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns one below the other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _notes(answers: Sequence[Answer]) -> list[str]:
    """Differences that do not hinder."""

    def where(text: Callable[[Answer], str]) -> list[str]:
        return [said for answer in answers if (said := text(answer))]

    notes = where(
        lambda one: f"the clock of {one.host} is {one.skew:+.1f} s off" if abs(one.skew) > _SKEW_NOTE_S else ""
    )
    notes += where(_little_disk)
    notes += where(_limits)
    for name in ("numpy", "python", "user"):
        values = [answer.facts[name] for answer in answers]
        if len(set(values)) > 1:
            notes.append(f"{name} differs: " + ", ".join(f"{one.host} {one.facts[name]}" for one in answers[:8]))
    return notes


def _little_disk(answer: Answer) -> str:
    free = answer.facts["free_bytes"]
    if free is None or free >= _LITTLE_DISK:
        return ""
    return f"little room for runs on {answer.host}: {free / (1 << 20):,.0f} MiB"


def _limits(answer: Answer) -> str:
    limits = answer.facts["limits"]
    said = []
    if 0 <= limits["nofile"] < _FEW_FILES:
        said.append(f"at most {limits['nofile']} open files (ulimit -Hn)")
    if answer.facts["machine"][2] and 0 <= limits["memlock"] < _LITTLE_MEMLOCK:
        said.append(f"at most {limits['memlock'] >> 10} KiB of locked memory (ulimit -l), too little for InfiniBand")
    return f"limits on {answer.host}: {'; '.join(said)}" if said else ""
