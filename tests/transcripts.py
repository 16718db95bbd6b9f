"""Pages of docs/ that show what is typed and what comes back: run them, and see that it does.

A block that begins with ```console is a transcript:

    $ instep run --hosts n1:2,n2:2 train.py      <- typed; goes on after a "\\" at its end, and to the END of a <<'END'
    instep: 4 ranks on 2 machines · …            <- printed; … stands for any text within a line
    …                                            <- and, alone on a line, for any number of lines
    $ echo $?

What is printed may hold more lines at the end of a command than the page shows only where the page says …. Times,
dates, ports and ids are equal to any other, so that a page can show real ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ANY = "…"
_VARYING = [
    (re.compile(r"\d{8}-\d{6}(-\d+)?"), "DATE"),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|images/s|threads?|cores?)\b"), r"N \2"),
    (re.compile(r"\bport \d+"), "port N"),
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(r"(?<=\.)\d{4,}\b"), "N"),
    (re.compile(r" +"), " "),
]


@dataclass(frozen=True)
class Typed:
    """One command of a page.

    Attributes:
        command: for a shell.
        shown: the lines that the page shows below it.
        line: where it stands.

    """

    command: str
    shown: tuple[str, ...]
    line: int


def read(page: Path) -> list[Typed]:
    """The commands of all transcripts of a page, in order."""
    found: list[Typed] = []
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            inside = line.strip() == "```console"
        elif inside and found and _goes_on(found[-1]):
            found[-1] = replace(found[-1], command=f"{found[-1].command}\n{line}")
        elif inside and line.startswith("$ "):
            found.append(Typed(line[2:], (), number))
        elif inside:
            found[-1] = replace(found[-1], shown=(*found[-1].shown, line))
    return found


def _goes_on(typed: Typed) -> bool:
    """Whether the next line belongs to the command."""
    document = re.search(r"<<'(\w+)'", typed.command)
    ended = document is None or typed.command.endswith(f"\n{document[1]}")
    return not typed.shown and (not ended or typed.command.endswith("\\"))


def differs(shown: tuple[str, ...], printed: str) -> str:
    """What the page shows and the command did not print; "" where all is there."""
    pattern = "".join(_line_pattern(line) for line in shown)
    got = "".join(f"{_settle(line)}\n" for line in printed.splitlines() if line.strip())
    return "" if re.fullmatch(pattern, got) else f"the page:\n{_indent(shown)}\nprinted:\n{_indent(got.splitlines())}"


def _line_pattern(line: str) -> str:
    if not line.strip():
        return ""
    if line.strip() == ANY:
        return r"(?:.*\n)*"
    return ".*".join(re.escape(part) for part in _settle(line).split(ANY)) + r"\n"


def _settle(line: str) -> str:
    for pattern, word in _VARYING:
        line = pattern.sub(word, line)
    return line.strip()


def _indent(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
