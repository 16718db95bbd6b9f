"""A process on each machine that does what an agent is asked for in the preflight: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from instep.launch.preflight.meeting import Meeting, Party, addresses_of, choose, whom

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.real.hosts import Host

TOKEN = "the token of this job"
PROGRAM = """
import json, sys
from instep.launch.preflight import facts, meeting
listener = None
for line in sys.stdin:
    verb, given = json.loads(line)
    if verb == "facts":
        answer = facts.gather(given)
    elif verb == "listen":
        ports = tuple(given["ports"]) if given["ports"] else None
        listener = meeting.Listener(given["token"], ports=ports, key=given["key"])
        answer = listener.port
    elif verb == "reach":
        answer = meeting.reach(given)
    else:
        answer = listener.release()
    print(json.dumps(answer), flush=True)
"""
COMMAND = ["timeout", "60", sys.executable, "-c", PROGRAM]


class Agent:
    """The process on one machine."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, verb: str, given: Any = None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, given]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, verb: str, given: Any = None) -> Any:
        self.send(verb, given)
        return self.receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0


@contextmanager
def agents(machines: Sequence[Host]) -> Iterator[list[Agent]]:
    """One on each."""
    with started({machine.name: machine.argv(COMMAND) for machine in machines}) as made:
        yield made


@contextmanager
def started(commands: Mapping[str, Sequence[str]]) -> Iterator[list[Agent]]:
    """One by each command: name of the machine -> what starts it there."""
    with ExitStack() as at_end:
        made = []
        for name, argv in commands.items():
            made.append(Agent(name, argv))
            at_end.callback(made[-1].close)
        yield made


def together(members: Sequence[Agent], verb: str, given: Sequence[Any]) -> list[Any]:
    """Ask all at once."""
    for member, each in zip(members, given, strict=True):
        member.send(verb, each)
    return [member.receive() for member in members]


ASKED = {"target": ["script", "train.py"], "cwd": "/", "runs": "/", "shared": None, "code": False}


def meet(
    members: Sequence[Agent], *, ports: tuple[int, int] = (20_000, 29_499), hint: str = "", key: str = "job"
) -> tuple[Meeting, int, list[Any], list[Any]]:
    """The meeting as the launcher holds it: where, on which port, what each machine has reached, and its facts."""
    found = together(members, "facts", [ASKED] * len(members))
    asked = [{"token": TOKEN, "ports": None if number else ports, "key": key} for number in range(len(members))]
    listening = together(members, "listen", asked)
    peers = [
        {
            "host": member.name,
            "addresses": addresses_of(facts, "" if number else hint),
            "port": port,
            "token": TOKEN,
        }
        for number, (member, facts, port) in enumerate(zip(members, found, listening, strict=True))
    ]
    reached = together(members, "reach", [whom(peers, number) for number in range(len(peers))])
    parties = [Party(*each) for each in zip((one.name for one in members), found, reached, strict=True)]
    return choose(parties, hint), listening[0], reached, found
