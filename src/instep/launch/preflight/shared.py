"""Is the folder of runs the same one on all machines? Found out by writing and reading, not by looking at mounts."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

_PREFIX = ".instep-shared-"


class Token:
    """Something in the folder of runs that only those can read who see the same folder. Removed on leaving.

    Each machine reads it and writes an answer beside it, which the launcher reads back::

        with shared.Token(runs) as token:
            ...facts.ask(..., token=token)...
            seen = token.seen(facts_of_a_machine)
    """

    def __init__(self, runs: Path) -> None:
        """Write it.

        Raises:
            RunError: the folder cannot be made or written here.

        """
        self._folder = runs.absolute() / f"{_PREFIX}{secrets.token_hex(8)}"
        self._text = secrets.token_hex(16)
        self._made_runs = False
        try:
            self._made_runs = not runs.exists()
            self._folder.mkdir(parents=True)
            (self._folder / "token").write_text(self._text)
        except OSError as error:
            self.remove()
            raise RunError(
                "the folder of runs cannot be written",
                evidence=[f"{runs.absolute()}: {error.strerror}"],
                cure="keep runs elsewhere:  --runs DIR",
            ) from error

    def asked(self) -> dict[str, str]:
        """The question for the machines."""
        return {"folder": str(self._folder)}

    def seen(self, facts: Mapping[str, Any]) -> str:
        """What is wrong with the machine's view of the folder, in a few words; "" where it is the same folder."""
        said = facts["shared"]
        if said["read"] != self._text:
            return "not shared"
        answer = said["wrote"]
        if not answer:
            return f"not writable: {said['why']}"
        try:
            back = (self._folder / f"answer-{answer}").read_text()
        except OSError as error:
            return f"its file does not come back: {error.strerror}"
        return "" if back == answer else "its file comes back changed"

    def remove(self) -> None:
        """Take it away, and the folder of runs too where it was made for this and has nothing else in it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._made_runs:
            with suppress(OSError):
                self._folder.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def look(asked: Mapping[str, str]) -> dict[str, Any]:
    """In the agent: read the token, write an answer.

    Returns:
        read: the token's text, None where it is not there; wrote: the name and text of the answer, None where that was
        not possible; why: the reason, in the system's words.

    """
    folder = Path(asked["folder"])
    answer = secrets.token_hex(8)
    read = None
    try:
        read = (folder / "token").read_text()
        with (folder / f"answer-{answer}").open("x") as file:
            file.write(answer)
            file.flush()
            os.fsync(file.fileno())  # or a network file system may keep it to itself
    except OSError as error:
        return {"read": read, "wrote": None, "why": error.strerror or str(error)}
    return {"read": read, "wrote": answer, "why": ""}
