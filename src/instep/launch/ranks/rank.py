"""One rank: a forked process becomes what ``python SCRIPT ARGS`` would have made."""

from __future__ import annotations

import builtins
import faulthandler
import gc
import importlib.util
import io
import os
import resource
import signal
import sys
import time
import types
from contextlib import suppress
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep import errors
from instep.launch.planning.place import rank_environment

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from instep.guard.recorder import Recorder
    from instep.launch.ranks.job import Job

_MOST_TEXT = 8_000  # characters of a message and of a traceback; JSON may take 6 bytes for each


def run(job: Job, number: int) -> None:
    """Run the job's program as ``__main__`` in this process.

    Whatever ends the program leaves this function, after it was reported to the launcher.
    """
    report = _become(job, number)
    me = os.getpid()
    recorder = _start_recorder(number)
    try:
        code, module = _load(job)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(code, module.__dict__)  # noqa: S102  # what `python SCRIPT` does
        if os.getpid() == me:
            _leave(recorder, None)
    except BaseException as error:
        # A child that the program forked may come by here as well: it is not the rank.
        if os.getpid() == me:
            with suppress(Exception):  # no launcher, an error that cannot be printed: python shows what it can
                _report(report, number, error)
            _leave(recorder, error)
        _show_only_users_frames()
        raise


def _start_recorder(number: int) -> Recorder | None:
    """Let the guard see what this rank does, where the launcher has a folder for it."""
    folder = os.environ.get("INSTEP_GUARD")
    if not folder:
        return None
    try:
        from instep.guard import recorder

        return recorder.start(Path(folder), number)
    except Exception as error:  # noqa: BLE001  # whatever ails the guard, the script runs
        print(f"instep: the guard does not see rank {number}: {error!r}", file=sys.stderr, flush=True)
        return None


def _leave(recorder: Recorder | None, error: BaseException | None) -> None:
    """Leave the guard a last record: the script has ended."""
    if recorder is None:
        return
    good = error is None or (isinstance(error, SystemExit) and _exit_code(error) == 0)
    try:
        recorder.leave("finished" if good else "failed", None if good else error)
    except Exception as failed:  # noqa: BLE001
        print(f"instep: the guard could not write its last record: {failed!r}", file=sys.stderr, flush=True)


def _become(job: Job, number: int) -> int:
    """Own session, streams and environment. Returns the descriptor for reports."""
    os.setsid()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != job.most_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (job.most_files, hard))
    if number:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    alone = len(job.outputs) == 1  # in a process of its own, which has no ends but its own
    for stream, descriptor in enumerate(job.outputs[0 if alone else number - job.place.first_rank], start=1):
        os.dup2(descriptor, stream)
    for pair in job.outputs:
        for descriptor in pair:
            os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines come to the screen when they are printed
    restarts = {"restart": job.restart, "max_restarts": job.max_restarts}
    os.environ.update(job.variables)
    os.environ.update(rank_environment(number, job.place, job.port, job.marker, job.folder, **restarts))
    faulthandler.enable()
    if "numpy.random.mtrand" in sys.modules:  # or every rank would draw the numbers of the fork server
        sys.modules["numpy.random.mtrand"].seed()
    gc.enable()
    _skip_destructors_of_the_server()
    return job.report


def _skip_destructors_of_the_server() -> None:
    """At the very end, after Python's own finalisation, do not run the C++ destructors of what the server has loaded.

    libtorch's take 0.1 s of a core per rank to free memory that is about to vanish, most of it copied first since it
    is shared. Handlers run last in, first out: those of all that is loaded from now on still run, then C's buffers are
    flushed, then the process ends with its own exit code. A tool that was put into the process from outside (nsys, a
    sanitizer) may count on the handlers that would be skipped; with one of those everything runs.
    """
    if not os.environ.keys().isdisjoint({"LD_PRELOAD", "CUDA_INJECTION64_PATH"}):
        return
    import ctypes

    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # another libc than glibc
        libc.on_exit(libc["_exit"], None)
        libc["__cxa_atexit"](libc.fflush, None, None)


def _load(job: Job) -> tuple[CodeType, types.ModuleType]:
    """Make the module ``__main__`` as python makes it, and compile its code."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [job.name, *job.arguments]
    switch = ["-m"] if job.kind == "module" else []
    sys.orig_argv = [sys.executable, *switch, *sys.argv]
    if job.kind == "module":
        return _load_module(job.name, module), module
    if job.kind == "folder":
        return _load_folder(_absolute(job.name), module), module
    path = _absolute(job.name)
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    _put_first(str(Path(path).resolve().parent))
    return compile(loader.get_data(path), path, "exec", dont_inherit=True), module


def _absolute(name: str) -> str:
    """As python makes it: ``./a/../b`` stays as it is behind the working folder."""
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  # pathlib would drop the leading "./"


def _load_folder(name: str, module: types.ModuleType) -> CodeType:
    """A folder or a zip file: its ``__main__``, as runpy does."""
    sys.path.insert(0, name)
    return _take_spec(PathFinder.find_spec("__main__", [name]), name, module)


def _load_module(name: str, module: types.ModuleType) -> CodeType:
    """``python -m NAME``, as runpy does: the parent packages are imported first."""
    _put_first(str(Path.cwd()))
    sys.argv[0] = "-m"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = _take_spec(spec, name, module)
    sys.argv[0] = str(spec.origin) if spec else name
    return code


def _take_spec(spec: Any, name: str, module: types.ModuleType) -> CodeType:
    code: CodeType | None = spec.loader.get_code(spec.name) if spec else None
    if code is None:
        raise ImportError(f"No code object available for {name}")
    module.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code


def _put_first(folder: str) -> None:
    """The first entry of sys.path, where python adds one."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _report(descriptor: int, number: int, error: BaseException) -> None:
    """Tell the launcher at once what has escaped: the teardown that follows may take long, or for ever."""
    import json
    import traceback

    when = time.monotonic()
    error.__traceback__ = _users(error.__traceback__)
    told: dict[str, Any] = {"rank": number, "time": when, "exit_code": _exit_code(error), "type": "", "message": ""}
    if not isinstance(error, SystemExit):
        kind = type(error)
        place = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
        text = "".join(traceback.format_exception(kind, error, error.__traceback__))
        if isinstance(error, errors.InstepError):
            text = ""  # its message is made to be read alone
        told |= {"type": place + kind.__qualname__, "message": str(error)[:_MOST_TEXT], "traceback": _cut(text)}
    elif told["exit_code"] in {0, 75}:
        return
    os.write(descriptor, json.dumps(told).encode())


def _cut(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n  ... {len(text) - _MOST_TEXT} characters left out ...\n{text[-half:]}"


def _exit_code(error: BaseException) -> int:
    """The code that python will end with."""
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, errors.InstepError) else 1


def _show_only_users_frames() -> None:
    """Python prints what escapes through sys.excepthook: let it, without the frames that brought us here."""
    errors.speak_plainly()
    hook = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        error.__traceback__ = _users(trace)
        return hook(kind, error, error.__traceback__)

    sys.excepthook = shown


def _users(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    ours = str(Path(__file__).parents[1])
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (file.startswith((ours, "<frozen importlib")) or file == importlib.util.__file__):
            return trace
        trace = trace.tb_next
    return None
