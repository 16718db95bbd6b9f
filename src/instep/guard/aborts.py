"""Hold an abort for a moment: long enough to see what was wrong, before the process and its records are gone.

gloo ends a process from a thread of its own, by abort(), where another rank sends more than was asked for. The
program's threads still wait in their collectives then, and can say in which.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import BinaryIO

_holding: list[bool] = []


def hold(fatal: BinaryIO) -> bool:
    """Let the thread that calls abort() sleep for six seconds before the process ends. True if it will.

    The C library's ``sleep`` is the handler of SIGABRT: it is called with the signal's number, 6. faulthandler comes
    before it and writes the stacks at once. A handler that the program has set is left alone.

    Args:
        fatal: where faulthandler writes.

    """
    if _holding or signal.getsignal(signal.SIGABRT) is not signal.SIG_DFL:
        return False
    library = _library()
    faulthandler.disable()
    try:
        before = library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
        if before:
            library.signal(signal.SIGABRT, before)
            return False
    finally:
        faulthandler.enable(fatal)
    _holding.append(True)
    return True


def release() -> None:
    """An abort ends the process at once again, and faulthandler writes to stderr."""
    if _holding:
        _holding.clear()
        faulthandler.disable()
        _library().signal(signal.SIGABRT, None)
    faulthandler.enable()


def _library() -> Any:
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return library
