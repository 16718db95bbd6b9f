"""The recorder: a thread in each rank that says several times a second where the rank is, and all it knows on demand.

It must never harm the program it watches: it changes nothing in it but for one hook after torch's optimizers (see
facts.py), handles no Python signals, runs no code of the user's, and holds the interpreter's lock for microseconds.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from instep.guard import aborts, facts, flight, positions, storage
from instep.guard.records import Beat, End, Frame, Group, Raised, Snapshot
from instep.runs import EXIT_OUT_OF_STEP

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from instep.guard.storage import RawGroup

EVERY_S = 0.2
_STILL_S = 0.4  # so long a rank has to stand still before it writes a snapshot by itself
_SHARE = 100  # a snapshot made unasked waits until this many times its own duration have passed
_FACTS_AT_S = (1.0, 10.0)  # seconds after the first group was there; then every `facts_every_s`

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_HEARD = {storage.STACKS_SIGNAL, *_FAULTS}  # by the recorder's thread: no others

_current: list[Recorder] = []  # this process's recorder, if it has one


class Recorder:
    """Records of this process. Made by :func:`start`."""

    def __init__(self, folder: Path, rank: int, every_s: float, facts_every_s: float) -> None:
        self._folder, self._rank, self._every_s, self._facts_every_s = folder, rank, every_s, facts_every_s
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._places = positions.Places()
        self._facts = facts.Facts(self._places)
        self._writer = storage.BeatWriter(folder, rank)
        self._asked = storage.Asked(folder)
        self._order = str(storage.end_path(folder, rank))
        self._answered = self._asked.count()
        self._lock = threading.RLock()  # of all that is written: the main thread writes in leaving
        self._end = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._files: list[BinaryIO] = []
        self._groups: dict[str, RawGroup] = {}  # all that were ever seen
        self._before: tuple[Any, ...] = ()
        self._since_s = time.monotonic()
        self._told_still = True
        self._next_unasked_s = 0.0
        self._facts_at: list[float] = []
        self._ended: End | None = None
        self._last_raised: Raised | None = None
        self._thread = threading.Thread(target=self._run, name="instep-recorder", daemon=True)

    def snapshot(self) -> None:
        """Write all that is known, now."""
        with self._lock:
            begin = time.monotonic()
            storage.write_snapshot(self._folder, self._take(), flight.dump(), self._places)
            self._next_unasked_s = begin + _SHARE * (time.monotonic() - begin)

    def leave(self, end: End, error: BaseException | None = None) -> None:
        """The rank's program has ended: a last snapshot. Never raises.

        Args:
            end: how.
            error: what ended it, if something did; a SystemExit with a code of success is a normal end.

        """
        if os.getpid() != self._pid:
            return
        with suppress(Exception):
            if isinstance(error, SystemExit) and error.code in {None, 0}:
                end, error = "finished", None
            with self._lock:
                self._ended = end
                if error is not None:
                    self._last_raised = positions.raised(error, self._places)
                self.snapshot()
                self._beat()

    def pause(self) -> None:
        """No beats from now on; for measuring."""
        self._going.clear()

    def resume(self) -> None:
        """Beats again."""
        self._going.set()

    def stop(self) -> None:
        """End the thread, let go of the files, which stay."""
        self._end.set()
        self._going.set()
        if os.getpid() == self._pid and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with suppress(ValueError, OSError):
            faulthandler.unregister(storage.STACKS_SIGNAL)
        self._close()
        if self in _current:
            _current.remove(self)

    def _begin(self) -> None:
        storage.mark_main_thread(self._folder, self._rank, self._main)
        stacks = storage.stacks_path(self._folder, self._rank).open("ab", buffering=0)
        fatal = storage.fatal_path(self._folder, self._rank).open("ab", buffering=0)
        self._files = [stacks, fatal]
        faulthandler.register(storage.STACKS_SIGNAL, stacks, all_threads=True, chain=False)
        faulthandler.enable(fatal)
        aborts.hold(fatal)
        self._facts.watch_optimizers()
        self._beat()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _HEARD)
        try:
            self._thread.start()  # with this mask: a program may wait for its signals in sigwait(), and get them all
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._going.wait()
            if os.access(self._order, os.F_OK):
                _obey(self._order)
            # Whatever goes wrong here is not the program's concern, and the next beat may be better.
            with suppress(Exception):
                self._look()

    def _look(self) -> None:
        with self._lock:
            if self._end.is_set():
                return
            now, still_s = self._beat()
            asked = self._asked.count()
            stands = still_s >= _STILL_S and not self._told_still and bool(self._groups)
            if asked != self._answered:
                self._answered = asked
                self.snapshot()
            elif (stands and now >= self._next_unasked_s) or self._facts_due(now):
                self.snapshot()
            else:
                self._facts.watch_optimizers()
                return
            self._told_still = self._told_still or stands

    def _facts_due(self, now: float) -> bool:
        """Whether it is time for fingerprints though nothing is wrong."""
        if not self._groups or self._ended:
            return False
        if not self._facts_at:
            self._facts_at = [now + after for after in _FACTS_AT_S]
        if now < self._facts_at[0]:
            return False
        del self._facts_at[0]
        if not self._facts_at:
            self._facts_at = [now + self._facts_every_s]
        return True

    def _beat(self) -> tuple[float, float]:
        """Write a sign of life. Returns the time and for how long nothing has changed."""
        frame = self._frame()
        stack, where = self._places.stack(frame)
        del frame
        groups = flight.groups()
        now, still_s = self._since(where, groups)
        if self._ended:
            groups = tuple(self._groups.values())
        self._writer.write(now, groups, stack, still_s, self._ended)
        return now, still_s

    def _since(self, where: tuple[int, ...], groups: tuple[RawGroup, ...]) -> tuple[float, float]:
        """The time, and for how long nothing has changed."""
        now = time.monotonic()
        here = (where, tuple(asked for _, _, asked in groups))
        if here != self._before:
            self._before, self._since_s, self._told_still = here, now, False
        for one in groups:
            self._groups[one[0]] = one
        return now, now - self._since_s

    def _frame(self) -> FrameType | None:
        """Where the main thread is; not in here, where it is itself that asks."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001  # the only way to another thread's stack
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame

    def _take(self) -> Snapshot:
        frame = self._frame()
        raw, where = self._places.stack(frame)
        stack = self._places.with_values(frame)
        known = self._facts.take(frame)
        del frame
        handled = positions.handled(self._main, self._places)
        groups = flight.groups()
        now, still_s = self._since(where, groups)
        if self._ended:
            groups = tuple(self._groups.values())
        beat = Beat(
            self._rank,
            self._pid,
            self._writer.count,
            now,
            tuple(Group(*one) for one in groups),
            tuple(Frame(file, line, function, user, {}, lasti) for file, line, function, user, lasti in raw),
            still_s,
            self._ended,
        )
        return Snapshot(beat, (), stack, handled, self._last_raised, known)

    def _close(self) -> None:
        with self._lock:
            self._writer.close()
            if self._files:
                with suppress(Exception):
                    aborts.release()  # to stderr, as it was
                for file in self._files:
                    file.close()
                self._files = []


def start(folder: Path, rank: int, *, every_s: float = EVERY_S, facts_every_s: float = 60.0) -> Recorder:
    """Begin to record this process; to be called in its main thread, before the program starts.

    Args:
        folder: of the job, in memory; it exists.
        rank: of the world.
        every_s: seconds between two beats.
        facts_every_s: seconds between two fingerprints where nothing is wrong.

    Raises:
        OSError: the folder cannot be written.

    """
    import atexit

    for old in _current[:]:
        old.stop()
    recorder = Recorder(folder, rank, every_s, facts_every_s)
    recorder._begin()  # noqa: SLF001  # the other half of the constructor
    _current.append(recorder)
    if not _hooked:
        os.register_at_fork(after_in_child=_forget)
        # Before Python ends: a thread that came out of torch's code after that would abort the process.
        atexit.register(_stop)
        _hooked.append(True)
    return recorder


def _obey(order: str) -> None:
    """End this process when the order says, and let no other thread of Python run until then.

    Where the first rank leaves, the others' collectives fail: a traceback from each would bury what is to be read.
    """
    with suppress(Exception):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with open(order) as file:  # noqa: PTH123
            left_s = float(file.read()) - time.monotonic()
        ctypes.PyDLL(None).usleep(max(0, int(min(left_s, 0.9) * 1e6)))  # PyDLL keeps the interpreter's lock
    os._exit(EXIT_OUT_OF_STEP)


_hooked: list[bool] = []


def _stop() -> None:
    for recorder in _current[:]:
        recorder.stop()


def _forget() -> None:
    """In a forked child: it is not the rank."""
    while _current:
        recorder = _current.pop()
        with suppress(Exception):
            faulthandler.unregister(storage.STACKS_SIGNAL)
            aborts.release()
            recorder._lock = threading.RLock()  # noqa: SLF001  # the thread that may have held it is not here
            recorder._close()  # noqa: SLF001
