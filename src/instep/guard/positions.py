"""Where a thread is, and what its variables are: read from outside of it, without running any code of the user's."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from instep.guard import texts
from instep.guard.records import Frame, Raised

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType, TracebackType

    from instep.guard.storage import RawFrame

MOST_FRAMES = 40  # in a beat
_MOST_INNER = 20  # of these, where a stack is deeper: the innermost, then the user's
_DEEPEST = 400  # frames that are looked at
_MOST_CODES = 10_000  # of which the place is remembered


class Places:
    """Which file a piece of code is from, and whether it is the user's."""

    def __init__(self, folder: str | None = None, not_users: Sequence[str] | None = None) -> None:
        self.folder = os.getcwd() if folder is None else folder  # noqa: PTH109  # as text
        self._files: dict[str, tuple[str, bool]] = {}
        self._codes: dict[CodeType, tuple[str, str, bool]] = {}
        self.not_users = tuple(sorted(_folders_of_others()) if not_users is None else not_users)

    def of_file(self, name: str) -> tuple[str, bool]:
        """A file's absolute path, and whether it is the user's."""
        found = self._files.get(name)
        if found is None:
            if name.startswith("<"):  # <string>, <frozen importlib._bootstrap>, ...: there is no file to show
                found = name, False
            else:
                path = os.path.normpath(os.path.join(self.folder, name))  # noqa: PTH118
                found = path, self._is_users(path)
            self._files[name] = found
        return found

    def of_code(self, code: CodeType) -> tuple[str, str, bool]:
        """A piece of code's file, its name, and whether it is the user's."""
        found = self._codes.get(code)
        if found is None:
            if len(self._codes) > _MOST_CODES:
                self._codes.clear()
            file, user = self.of_file(code.co_filename)
            found = self._codes[code] = file, getattr(code, "co_qualname", code.co_name), user
        return found

    def stack(self, frame: FrameType | None) -> tuple[list[RawFrame], tuple[int, ...]]:
        """A thread's stack, innermost first, and what changes whenever it moves."""
        found: list[RawFrame] = []
        where: list[int] = []
        depth = 0
        while frame is not None and depth < _DEEPEST:
            code = frame.f_code
            lasti = frame.f_lasti
            file, function, user = self.of_code(code)
            if depth < MOST_FRAMES or user:
                found.append((file, frame.f_lineno or code.co_firstlineno, function, user, lasti))
            where += (id(code), lasti)
            frame = frame.f_back
            depth += 1
        if len(found) > MOST_FRAMES or depth > MOST_FRAMES:
            found = found[:_MOST_INNER] + [one for one in found[_MOST_INNER:] if one[3]]
            del found[MOST_FRAMES:]
        return found, tuple(where)

    def with_values(self, frame: FrameType | None) -> tuple[Frame, ...]:
        """A thread's stack, innermost first, with the variables of the user's functions and of collectives."""
        found: list[Frame] = []
        while frame is not None and len(found) < _DEEPEST:
            found.append(self.frame(frame, frame.f_lineno, frame.f_lasti))
            frame = frame.f_back
        return tuple(found)

    def frame(self, frame: FrameType, line: int | None, lasti: int) -> Frame:
        """One frame with its values."""
        file, function, user = self.of_code(frame.f_code)
        if user:
            values = texts.variables(frame)
        elif file.endswith("distributed_c10d.py"):
            values = texts.arguments(frame)
        else:
            values = {}
        return Frame(file, line or frame.f_code.co_firstlineno, function, user, values, lasti)

    def user_frames(self, frame: FrameType | None) -> list[FrameType]:
        """The frames of the user's functions, innermost first."""
        found: list[FrameType] = []
        while frame is not None and len(found) < MOST_FRAMES:
            if self.of_code(frame.f_code)[2]:
                found.append(frame)
            frame = frame.f_back
        return found

    def _is_users(self, path: str) -> bool:
        if "/site-packages/" in path or "/dist-packages/" in path:
            return False
        return not path.startswith(self.not_users) and not os.path.basename(path).startswith("<")  # noqa: PTH119


def _folders_of_others() -> set[str]:
    """The folders of Python, of instep, and of torch where it lies elsewhere; of what torch compiles, too."""
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], str(Path(__file__).parent.parent)}
    found |= {os.path.dirname(os.__file__), "/tmp/torchinductor_"}  # noqa: PTH120, S108  # its place, not ours
    torch = sys.modules.get("torch")
    if file := getattr(torch, "__file__", None):
        found.add(os.path.dirname(file))  # noqa: PTH120
    return {one if one.endswith("_") else one + os.sep for path in found for one in (path, os.path.realpath(path))}


def raised(error: BaseException, places: Places) -> Raised:
    """An exception, with the frames from where it was raised to where it is handled."""
    kind = type(error)
    return Raised(texts.class_name(kind), texts.message(error), frames_of(error.__traceback__, places))


def frames_of(trace: TracebackType | None, places: Places) -> tuple[Frame, ...]:
    """The frames of a traceback, innermost first."""
    found: list[Frame] = []
    while trace is not None and len(found) < _DEEPEST:
        found.append(places.frame(trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    return tuple(reversed(found))


def handled(thread: int, places: Places) -> tuple[Raised, ...]:
    """The exceptions that a thread is handling just now, innermost first."""
    look = getattr(sys, "_current_exceptions", None)
    found = look().get(thread) if look else None
    if isinstance(found, tuple):  # before Python 3.12: type, value, traceback
        found = found[1]
    chain: list[Raised] = []
    while isinstance(found, BaseException) and len(chain) < 4:
        chain.append(raised(found, places))
        found = found.__context__
    return tuple(chain)
