"""Run a function on several ranks in a test, in a second or two.

    def test_sum():
        def work(scale):
            return instep.total(instep.rank() * scale)

        assert run_ranks(work, 3, 10) == [30, 30, 30]

The function may be a closure. Each rank's value comes back, in rank order. The exception of the rank that failed
first is raised again here: its own type, its traceback as the cause, its rank as ``.rank``. A job that hangs is
killed at its limit, and a process that a rank leaves behind fails the test.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from tests.commands import HungError, LeakedError, Result, run_command
from tests.rank_server import Answer, Job, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["HungError", "LeakedError", "RankDiedError", "Result", "free_port", "run_command", "run_job", "run_ranks"]

LAUNCHERS = ("SLURM_", "SRUN_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "HYDI_", "TORCHELASTIC_", "MASTER_", "GROUP_")
SINGLE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


class RankDiedError(AssertionError):
    """A rank ended without a value and without an exception."""


class RankTraceback(Exception):
    """The traceback of an exception where it was raised; the cause of the one raised here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True)
class Done:
    """A job that went well: each rank's value and what it wrote."""

    values: list[Any]
    outputs: list[str]
    seconds: float


def run_ranks(fn: Callable[..., Any], nproc: int = 2, *args: Any, **options: Any) -> list[Any]:
    """Each rank's value of ``fn(*args, **kwargs)``, in rank order; see :func:`run_job` for the options."""
    return run_job(fn, nproc, *args, **options).values


def run_job(
    fn: Callable[..., Any],
    nproc: int = 2,
    *args: Any,
    limit_s: float = 30.0,
    env: Mapping[str, str | None] | None = None,
    nodes: Sequence[int] | None = None,
    join: str | None = "instep",
    **kwargs: Any,
) -> Done:
    """Run ``fn(*args, **kwargs)`` on `nproc` ranks.

    Args:
        fn: the function; it is pickled by value, so a closure will do.
        nproc: how many ranks.
        args: for the function.
        limit_s: when a job is killed as hanging.
        env: variables for every rank, None to unset one.
        nodes: how many ranks each (pretended) node has, if there is more than one node.
        join: "instep": between ``instep.init()`` and ``instep.close()``; "torch": in a plain gloo process group;
            None: without joining.
        kwargs: for the function.

    """
    folder = Path(tempfile.mkdtemp(prefix="instep-ranks-"))
    try:
        ranks = tuple(_environments(nproc, nodes or [nproc], env or {}))
        call = _dump(fn, args, kwargs)
        job = Job(folder, call, ranks, str(Path.cwd()), tuple(sys.path), join, limit_s)
        started = time.monotonic()
        verdict = _ask(job)
        return _conclude(job, verdict, time.monotonic() - started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launcher_variables() -> list[str]:
    """What a launcher around pytest has set: no test may see it."""
    return [name for name in os.environ if name in SINGLE or name.startswith(LAUNCHERS)]


def free_port() -> int:
    """A TCP port that nobody listens on, outside the range that the kernel gives to clients."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(15000, low)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port among 100 tried")


def _environments(nproc: int, nodes: Sequence[int], extra: Mapping[str, str | None]) -> list[dict[str, str]]:
    assert sum(nodes) == nproc, f"nodes {list(nodes)} do not have {nproc} ranks"
    outside = launcher_variables()
    base = {name: value for name, value in os.environ.items() if name not in outside}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nproc)}
    base |= {"OMP_NUM_THREADS": "1"}
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    ranks = []
    for rank, (node, local) in enumerate(places):
        one = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": nodes[node], "GROUP_RANK": node}
        given: dict[str, str | None] = {**base, **{k: str(v) for k, v in one.items()}, **extra}
        ranks.append({k: v for k, v in given.items() if v is not None})
    return ranks


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Code travels whole: cloudpickle alone would forget which file it is from."""

    dispatch_table: ClassVar = ChainMap(
        {CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}, cloudpickle.Pickler.dispatch_table
    )


def _dump(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call, with the test's own module by value: its assertions keep their explanations."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    by_value = module is not None and module.__name__.rpartition(".")[2].startswith("test_")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump((fn, args, kwargs))
        return buffer.getvalue()
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


_server: list[socket.socket] = []


def _ask(job: Job) -> Verdict:
    """Send the job to the fork server, which starts with the first one and ends when this process does."""
    if not _server:
        ours, theirs = socket.socketpair()
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        argv = [sys.executable, "-c", f"from tests.rank_server import serve; serve({theirs.fileno()})"]
        root = Path(__file__).parent.parent
        subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], env={**os.environ, **single}, cwd=root, start_new_session=True
        )
        theirs.close()
        _server.append(ours)
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(_server[0], [b"j"], [theirs.fileno()])
    with ours, ours.makefile("rwb") as stream:
        pickle.dump(job, stream)
        stream.flush()
        ours.settimeout(job.limit_s + 30)
        verdict = pickle.load(stream)
    assert isinstance(verdict, Verdict), f"the supervisor of the ranks failed:\n{verdict}"
    return verdict


def _conclude(job: Job, verdict: Verdict, seconds: float) -> Done:
    outputs = [_read(job.folder / f"out-{rank}") for rank in range(len(job.ranks))]
    for rank, text in enumerate(outputs):
        for line in text.splitlines():
            print(f"[{rank}] {line}")  # for pytest to show when the test fails
    failed = [rank for rank, status in verdict.ended.items() if status != 0]
    if failed:
        # A rank that died without a word is the culprit; the others only lost their connection to it.
        first = min(failed, key=lambda rank: (_answer(job, rank).consequence, _answer(job, rank).at))
        raise _failure(first, _answer(job, first), verdict.ended[first], outputs[first])
    if verdict.hung:
        raise HungError(_hang(job, verdict))
    if verdict.left:
        raise LeakedError(f"{len(verdict.left)} left behind when the ranks had ended: {'; '.join(verdict.left)}")
    values = [pickle.loads(_answer(job, rank).payload) for rank in range(len(job.ranks))]
    return Done(values, outputs, seconds)


def _answer(job: Job, rank: int) -> Answer:
    file = job.folder / f"answer-{rank}"
    if not file.exists():  # the rank was killed before it could answer
        return Answer(payload=b"")
    answer = pickle.loads(file.read_bytes())
    assert isinstance(answer, Answer)
    return answer


def _failure(rank: int, answer: Answer, status: int, output: str) -> BaseException:
    """The exception of a rank that failed, as it was raised there."""
    error: BaseException | None = None
    if answer.traceback:
        error = pickle.loads(answer.payload)
        error = error or RuntimeError(f"rank {rank} raised what cannot be pickled:\n{answer.traceback}")
        error.__cause__ = RankTraceback(f"[rank {rank}] {answer.traceback}")
    else:
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        error = RankDiedError(f"rank {rank} ended with {how}; its last words:\n{output[-2000:]}")
    with contextlib.suppress(AttributeError):
        setattr(error, "rank", rank)  # noqa: B010 (an exception of any type)
    return error


def _hang(job: Job, verdict: Verdict) -> str:
    size = len(job.ranks)
    lines = [f"ranks {_list(verdict.hung)} of {size} did not end within {job.limit_s:g} s"]
    if verdict.ended:
        lines.append(f"ranks {_list(sorted(verdict.ended))} had ended")
    for rank in verdict.hung:
        answered = " (after its function had returned)" if (job.folder / f"answer-{rank}").exists() else ""
        lines.append(f"--- rank {rank}{answered}\n{_read(job.folder / f'stack-{rank}')}")
    return "\n".join(lines)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
