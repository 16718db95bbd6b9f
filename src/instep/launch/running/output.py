"""What the ranks print: all of it into ``log/rank-N.txt``, the main rank's (or everybody's) to the screen."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import selectors
import termios
import time
import tty
from contextlib import suppress
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 13  # with --show all: shown in pieces from here on


class Screen:
    """One of the launcher's own standard streams."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.at_line_start = True
        self._closed = False

    def write(self, data: bytes) -> None:
        """Write all of it. A reader that has gone (``| head``) does not end the run: the logs have everything."""
        view = memoryview(data)
        while view and not self._closed:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # somebody made our terminal non-blocking
                select.select([], [self.descriptor], [])
            except OSError:
                self._closed = True
        if data:
            self.at_line_start = data.endswith((b"\n", b"\r"))


class Stream:
    """One stream of one rank on its way to the log and the screen."""

    def __init__(self, log: Log, screen: Screen | None, prefix: bytes, source: int = -1) -> None:
        self.source = source
        self._log = log
        self._screen = screen
        self._prefix = prefix
        self._rest = b""
        if source >= 0:
            os.set_blocking(source, False)

    def pump(self) -> bool:
        """Pass on what is there now; False at the end of the stream.

        Raises:
            RunError: the log cannot be written.

        """
        try:
            data = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:  # a pty says so when its last writer has gone
                raise
            data = b""
        if not data:
            return False
        self.take(data)
        return True

    def take(self, data: bytes) -> None:
        """Pass this on.

        Raises:
            RunError: the log cannot be written.

        """
        self._log.write(data)
        if not self._prefix:
            self._show(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        self._show(b"".join(self._prefix + _settled(line) + b"\n" for line in lines))

    def show_on(self, screen: Screen | None) -> None:
        """From now on this is its screen."""
        self._screen = screen

    def finish(self) -> None:
        """Show a last line that has no end."""
        if self._rest:
            self._show(self._prefix + _settled(self._rest) + b"\n")
            self._rest = b""

    def _show(self, data: bytes) -> None:
        if self._screen is not None and data:
            self._screen.write(data)


def _settled(line: bytes) -> bytes:
    """Of a line that was drawn over (a progress bar) what a terminal shows in the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Log:
    """``log/rank-N.txt``, as the rank wrote it: both streams, raw."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            RunError: it cannot be written, a full disk for instance.

        """
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.written += len(data)

    @property
    def is_begun(self) -> bool:
        """Whether an earlier part of the run has written to it."""
        return os.fstat(self._file).st_size > 0

    def close(self) -> None:
        """Nothing more comes."""
        os.close(self._file)

    def tail(self, lines: int) -> list[str]:
        """The last lines."""
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - lines * 500))
            return file.read().decode(errors="replace").splitlines()[-lines:]


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a file in the run folder that cannot be written: says which file system, and what is free."""
    evidence = [f"{path}: {error.strerror}"]
    with suppress(OSError):
        facts = os.statvfs(path.parent)
        evidence.append(f"file system {_mount(path)}: {facts.f_bavail * facts.f_frsize:,} bytes free for you")
    cure = "make room, or keep runs elsewhere with --runs DIR"
    return RunError("the run folder cannot be written; all ranks were ended", evidence=evidence, cure=cure)


def _mount(path: Path) -> Path:
    """The mount point that the file lies under."""
    return next(parent for parent in path.resolve().parents if parent.is_mount())


class Output:
    """All streams of all ranks."""

    def __init__(self, folder: Path, hosts: Sequence[str], show: str, *, piped: bool = True, stdout: int = 1) -> None:
        """Make the logs, and the pipes for ranks of this machine.

        Args:
            folder: the run folder.
            hosts: the machine of each rank, "" where all are on one.
            show: "main" or "all".
            piped: whether the ranks write into pipes of ours; else what they write comes by :meth:`feed`.
            stdout: the descriptor that takes what ranks print to their standard output.

        Raises:
            OSError: no log can be made, or there are too few descriptors.

        """
        self.stdout, self.stderr = Screen(stdout), Screen(2)
        self.logs = [Log(folder / "log" / f"rank-{rank}.txt") for rank in range(len(hosts))]
        self.ends: list[tuple[int, int]] = []
        self._show = show
        self._open_streams = selectors.DefaultSelector()
        self._streams: list[tuple[Stream, Stream]] = []  # of each rank: standard output, standard error
        self._terminals: list[tuple[int, Screen]] = []
        for rank, (log, host) in enumerate(zip(self.logs, hosts, strict=True)):
            prefix = f"[rank {rank}{f' on {host}' if host else ''}] ".encode() if show == "all" else b""
            out, err = (self.stdout, self.stderr) if self.shows(rank) else (None, None)
            if piped:
                (one, out_end), (two, err_end) = self._open(log, out, prefix), self._open(log, err, prefix)
                self.ends.append((out_end, err_end))
            else:
                one, two = Stream(log, out, prefix), Stream(log, err, prefix)
            self._streams.append((one, two))

    def _open(self, log: Log, screen: Screen | None, prefix: bytes) -> tuple[Stream, int]:
        """Make one stream, and the end that the rank writes to."""
        if screen is not None and screen.is_terminal and not prefix:
            source, end = os.openpty()  # the rank sees a terminal: progress bars, colour
            tty.setraw(end)  # our own terminal does the rest
            self._terminals.append((source, screen))
            self.resize()
        else:
            source, end = os.pipe()
        stream = Stream(log, screen, prefix, source)
        self._open_streams.register(source, selectors.EVENT_READ, stream)
        return stream, end

    def renew(self, folder: Path, hosts: Sequence[str]) -> Output:
        """For another round of ranks whose output comes by :meth:`feed`: the same screen, logs that go on.

        Raises:
            OSError: no log can be opened.

        """
        for log in self.logs:
            log.close()
        fresh = Output(folder, hosts, self._show, piped=False, stdout=self.stdout.descriptor)
        fresh.stdout, fresh.stderr = self.stdout, self.stderr
        for pair, rank in zip(fresh._streams, range(len(hosts)), strict=True):
            for stream, screen in zip(pair, (self.stdout, self.stderr), strict=True):
                stream.show_on(screen if fresh.shows(rank) else None)
        return fresh

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on what a rank of another machine has written: to its standard output (1) or error (2).

        Raises:
            RunError: its log cannot be written.

        """
        self._streams[rank][stream - 1].take(data)

    def shows(self, rank: int) -> bool:
        """Whether what this rank prints comes to the screen."""
        return self._show == "all" or rank == 0

    def fileno(self) -> int:
        """Readable when there is something to pass on: for the launcher's own selector."""
        return self._open_streams.fileno()  # an epoll is a file, too

    def close_ends(self) -> None:
        """Close the ranks' ends in this process, so that streams can end."""
        for end in (one for pair in self.ends for one in pair):
            os.close(end)

    def resize(self) -> None:
        """Give the main rank's terminals the size of ours."""
        for source, screen in self._terminals:
            with suppress(OSError):
                size = fcntl.ioctl(screen.descriptor, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)

    def pump(self, wait_s: float = 0.0) -> bool:
        """Pass on what is there; False where there was nothing.

        Raises:
            RunError: a log cannot be written.

        """
        ready = self._open_streams.select(wait_s)
        for key, _ in ready:
            if not key.data.pump():
                self._open_streams.unregister(key.fd)
                os.close(key.fd)
        return bool(ready)

    def drain(self, wait_s: float = 0.0, limit_s: float = 0.5) -> None:
        """Pass on all that is there, until nothing new has come for `wait_s`."""
        end = time.monotonic() + limit_s  # one who never stops writing shall not keep us
        while self._open_streams.get_map() and self.pump(wait_s) and time.monotonic() < end:
            pass

    def finish(self) -> None:
        """After the last rank has gone: pass on the rest, and stop even if somebody still holds a pipe.

        Raises:
            RunError: a log cannot be written.

        """
        self.drain(0.05)  # what was written to a pty arrives a moment later
        for pair in self._streams:
            for stream in pair:
                stream.finish()

    def say(self, lines: Iterable[str]) -> None:
        """Print lines of our own, on the launcher's stderr, each on a line of its own."""
        together = self.stderr.is_terminal and self.stdout.is_terminal
        fresh = self.stderr.at_line_start and (self.stdout.at_line_start or not together)
        text = "".join(f"{line}\n" for line in lines)
        if not text:
            return
        self.stderr.write((b"" if fresh else b"\n") + text.encode(errors="replace"))
        self.stdout.at_line_start = self.stdout.at_line_start or together
