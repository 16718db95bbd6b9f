"""A process that has imported torch once, and forks the ranks of test jobs. Started by tests.harness.

For each job it forks a supervisor, which forks the ranks, ends them at their limit, and finds what they left behind:
as a subreaper it inherits every orphan of its job, a daemon too. The answers lie in the job's folder.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 7  # one that no program under test uses
AFTER_FAILURE_S = 1.0  # what the other ranks get to end by themselves when one has failed
LEFT_S = 2.0  # helpers of multiprocessing go away when they notice that their rank is gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Job:
    """What the harness asks for."""

    folder: Path
    call: bytes  # pickled (function, args, kwargs)
    ranks: tuple[Mapping[str, str], ...]  # the whole environment of each rank
    cwd: str
    path: tuple[str, ...]  # sys.path
    join: str | None
    limit_s: float


@dataclass
class Verdict:
    """What the supervisor saw."""

    ended: dict[int, int] = field(default_factory=dict)  # rank -> exit status, in the order in which they ended
    hung: tuple[int, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a rank leaves in the job's folder."""

    payload: bytes  # the pickled value or exception
    traceback: str = ""  # of an exception
    at: float = 0.0  # when it was raised
    consequence: int = 0  # how likely another rank's failure is behind it


def serve(fd: int) -> None:
    """Fork a supervisor for each job that comes over this socket, until the harness is gone."""
    # Imported here once, for all ranks: they take seconds. (torch.optim and DDP ask for the compiler.)
    for name in ("torch._dynamo", "torch.distributed.optim", "torch.utils.data", "instep.train"):
        importlib.import_module(name)

    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a supervisor ended
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        line = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            _run_and_exit(lambda line=line: _supervise(line))
        line.close()


def _run_and_exit(work: Any) -> None:
    """Do the work of a forked process; never return into the code of its parent."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        code = work() or 0
    except BaseException:  # noqa: BLE001 (nothing may return from a fork)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _supervise(line: socket.socket) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    with line.makefile("rwb") as stream:
        job: Job = pickle.load(stream)
        try:
            pickle.dump(_run(job), stream)
        except Exception:  # noqa: BLE001 (the harness shows it)
            pickle.dump(traceback.format_exc(), stream)


def _run(job: Job) -> Verdict:
    verdict = Verdict()
    pids: dict[int, int] = {}
    for rank in range(len(job.ranks)):
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda rank=rank: _rank(job, rank))
        pids[pid] = rank
    deadline = time.monotonic() + job.limit_s
    failed = False
    while len(verdict.ended) < len(pids) and (rest := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], rest)
        for pid, status in _reap():
            if pid in pids:
                verdict.ended[pids[pid]] = status
                if status != 0 and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    running = {pid: rank for pid, rank in pids.items() if rank not in verdict.ended}
    if running and not failed:
        verdict.hung = tuple(sorted(running.values()))
        _dump_stacks(running, job.folder)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    verdict.left = _left(set(running))
    return verdict


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _dump_stacks(running: Mapping[int, int], folder: Path) -> None:
    """Each rank writes its stack itself, in a signal handler that needs no interpreter lock."""
    files = [folder / f"stack-{rank}" for rank in running.values()]
    for pid in running:
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.01)
    time.sleep(0.05)  # for the rest of the lines


def _left(killed: set[int]) -> tuple[str, ...]:
    """The processes that outlive their ranks; they are killed."""
    deadline = time.monotonic() + LEFT_S
    while True:
        _reap()
        found = [p for p in psutil.Process().children(recursive=True) if p.pid not in killed]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    left = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            left.append(f"pid {process.pid}: {' '.join(process.cmdline())[:200] or process.name()}")
    while children := psutil.Process().children(recursive=True):
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
        _reap()
    return tuple(left)


def _write(file: Path, data: bytes) -> None:
    """Whole or not at all: a rank may be killed in the middle."""
    draft = file.with_name(f"{file.name}.tmp")
    draft.write_bytes(data)
    draft.replace(file)


def _rank(job: Job, rank: int) -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    _redirect(job.folder / f"out-{rank}")
    stacks = (job.folder / f"stack-{rank}").open("w")
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(job.ranks[rank])
    os.chdir(job.cwd)
    sys.path[:] = job.path
    sys.argv = ["rank"]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    answer = job.folder / f"answer-{rank}"
    try:
        _write(answer, pickle.dumps(_value(_call(job))))
    except BaseException as error:  # noqa: BLE001 (raised again by the harness)
        _write(answer, pickle.dumps(_failure(error)))
        return 1
    # The end of a Python program: threads, then exit functions. A hang there is a hang.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return 0


def _redirect(file: Path) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _call(job: Job) -> object:
    function, args, kwargs = pickle.loads(job.call)
    if job.join is None:
        return function(*args, **kwargs)
    timeout_s = job.limit_s * 0.8  # a rank that cannot join says so itself before the limit
    if job.join == "torch":
        from datetime import timedelta

        import torch.distributed as dist

        from instep.comm.leave import let_threads_come_to_rest

        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        value = function(*args, **kwargs)
        let_threads_come_to_rest()  # a bug of torch's own, not what the test is about
        dist.destroy_process_group()
        return value
    import instep

    instep.init(timeout=timeout_s)
    value = function(*args, **kwargs)
    instep.close()
    return value


def _value(value: object) -> Answer:
    try:
        return Answer(cloudpickle.dumps(value))
    except Exception as error:
        message = f"a rank returned a {type(value).__qualname__}, which cannot be pickled: {error}"
        raise TypeError(message) from error


def _failure(error: BaseException) -> Answer:
    at = time.monotonic()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        # The traceback stays here: its frames hold what cannot travel.
        payload = cloudpickle.dumps(error.with_traceback(None))
        pickle.loads(payload)
    except Exception:  # noqa: BLE001 (it cannot travel, for whatever reason: its text does)
        payload = cloudpickle.dumps(None)
    return Answer(payload, text, at, _consequence(error))


def _consequence(error: BaseException) -> int:
    """0 for an error of its own; 1 for a StepError, which often tells of another rank's; 2 for a lost connection."""
    if isinstance(error, RuntimeError) and "Connection" in str(error):
        return 2
    return int(type(error).__name__ == "StepError")
