"""A connection made of two pipes, with one JSON object a line on each."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FULL = 1 << 20  # bytes that wait to be sent: from here on the ranks' output has to wait, too
_CHUNK = 1 << 16
_MOST = 64  # chunks that are read at once: the other connections want to be heard, too


class Channel:
    """One end.

    Attributes:
        source: the descriptor that is read.
        sink: the one that is written.
        is_closed: the other side has gone.
        heard_at: when something came last, by the monotonic clock.
        noise: the last lines that were no messages: what a login script prints.

    """

    def __init__(self, source: int, sink: int) -> None:
        for descriptor in (source, sink):
            os.set_blocking(descriptor, False)
        self.source, self.sink = source, sink
        self.is_closed = False
        self.heard_at = time.monotonic()
        self.noise: deque[str] = deque(maxlen=20)
        self._in = bytearray()
        self._out = bytearray()
        self._lock = threading.Lock()  # pings are sent from a thread of their own

    @property
    def waiting(self) -> int:
        """Bytes that are still to be sent."""
        return len(self._out)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; what does not go at once goes with :meth:`flush`."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if not self.is_closed:
                self._out += line
                self._flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self.sink, self._out[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more; the end of what it said tells
            self._out.clear()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, without waiting."""
        for _ in range(_MOST):
            try:
                data = os.read(self.source, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                break
            self.heard_at = time.monotonic()
            self._in += data
        whole, found, rest = self._in.rpartition(b"\n")
        if not found:
            return []
        self._in = rest
        return [message for line in whole.split(b"\n") if (message := self._read(line)) is not None]

    def _read(self, line: bytes | bytearray) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            return message
        if line.strip():
            self.noise.append(line.decode(errors="replace").rstrip())
        return None
