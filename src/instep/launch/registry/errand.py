"""What ``instep ps`` and ``instep stop`` do on other machines: ``PYTHON -m instep.launch.registry.errand``, over ssh.

The errand is read from standard input as JSON, and its answer is one marked line of standard output, so that what a
login shell prints besides does no harm. Standard library only.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instep.launch.agents.ssh import CONNECT_S, Way
from instep.launch.registry.ending import end_here
from instep.launch.registry.sightings import look, processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MARK = "instep-errand "
_AT_ONCE = 64  # ssh clients


@dataclass(frozen=True)
class Answer:
    """What a machine said.

    Attributes:
        host: as the user named it.
        values: its answer; empty where it gave none.
        why: why it gave none, in one line.

    """

    host: str
    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def send(errand: Mapping[str, Any], hosts: Sequence[str], way: Way, seconds: float) -> list[Answer]:
    """Have all these machines do it, at the same time.

    Args:
        errand: see :func:`main`.
        hosts: what ssh is given.
        way: how they are reached.
        seconds: how long each may take at most.

    """
    if not hosts:
        return []
    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        return list(pool.map(lambda host: _ask(errand, host, way, seconds), hosts))


def _argv(host: str, way: Way, seconds: float) -> list[str]:
    """The command that runs an errand there; / holds no modules that Python would find first, a home may."""
    return [
        *way.options(connect_s=seconds),
        "--",
        host,
        f"cd / && exec {shlex.quote(way.python)} -m instep.launch.registry.errand",
    ]


def _ask(errand: Mapping[str, Any], host: str, way: Way, seconds: float) -> Answer:
    try:
        done = subprocess.run(
            _argv(host, way, min(seconds, CONNECT_S)),
            input=json.dumps(errand) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            start_new_session=True,  # a terminal's Ctrl-C is for us; and ssh asks nobody for a password
        )
    except subprocess.TimeoutExpired:
        return Answer(host, why=f"no answer within {seconds:g} s")
    except OSError as error:
        return Answer(host, why=f"ssh cannot be started: {error.strerror}")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return Answer(host, values=json.loads(line[len(_MARK) :]))
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return Answer(host, why=words[-1] if words else f"{way.python} there said nothing (exit code {done.returncode})")


def run(errand: Mapping[str, Any]) -> dict[str, Any]:
    """Do it here.

    Args:
        errand: {"do": "look"}, {"do": "list", "job"} or {"do": "end", "job", "record", "grace"}.

    """
    if errand["do"] == "look":
        return {"sightings": [one.as_json() for one in look()]}
    if errand["do"] == "list":
        return {"processes": [one.name for one in processes(errand["job"])]}
    return {"ended": end_here(errand["job"], errand["record"], errand["grace"]).as_json()}


def main() -> None:
    """Read the errand, do it, answer."""
    answer = run(json.loads(sys.stdin.readline()))
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
