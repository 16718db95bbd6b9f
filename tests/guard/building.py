"""Views of ranks that have really run a program: as threads, over a make-believe torch.distributed that only records.

A collective returns when all members of its group have asked for the same index and kind; otherwise it waits for ever,
as gloo's do. Once no rank moves any more, the stacks, values and records become :class:`View` s.
"""

from __future__ import annotations

import importlib
import itertools
import math
import queue
import sys
import textwrap
import threading
import time
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.guard import texts
from instep.guard.records import Beat, Frame, Group, Op, Process, Raised, Snapshot, View

MARK = "# <- HERE"
_LIBRARY = "/venv/site-packages/torch/distributed/distributed_c10d.py"
_OPTIMIZER = "/venv/site-packages/torch/optim/lbfgs.py"
_ENGINE = "/venv/site-packages/trainers/engine.py"
_OURS = threading.local()
_numbers = itertools.count()

_DIST = """
def all_reduce(x, group=None, async_op=False): return _work("all_reduce", x, group, async_op)
def broadcast(x, src=0, group=None, async_op=False): return _work("broadcast", x, group, async_op)
def reduce(x, dst=0, group=None): return _work("reduce", x, group)
def gather(x, gather_list=None, dst=0, group=None): return _work("gather", x, group)
def all_gather(parts, x, group=None): return _work("all_gather", x, group)
def barrier(group=None): return _work("barrier", None, group)
def all_gather_object(parts, value, group=None):
    _work("all_gather", torch.ones(1, dtype="Long"), group)
    _work("all_gather", torch.ones(len(repr(value)), dtype="Byte"), group)
def send(x, dst=0): return _message("send", dst)
def recv(x, src=0): return _message("recv", src)
def backward(*shapes):
    for shape in shapes or ((1000,),): _work("all_reduce", torch.ones(*shape), None)
def call(model, *args):
    return model.forward(*args)
def get_rank(group=None): return _rank()
def get_world_size(group=None): return _size()
"""
_TRAINER = """
def fit(module, loader, callbacks=()):
    for index, batch in enumerate(loader):
        module.training_step(batch, index)
        for callback in callbacks:
            callback.on_step_end(module, index)
    module.on_end()
"""


_LBFGS = """
def minimize(closure, times):
    for _ in range(times):
        closure()
"""


class _Closed(BaseException):
    """The end of a simulation."""


class Tensor:
    def __init__(self, shape: tuple[int, ...], dtype: str = "Float", value: float = 1.0) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value

    def __repr__(self) -> str:
        return f"tensor({self.value})" if self.shape == () else f"tensor{list(self.shape)} {self.dtype}"

    def item(self) -> float:
        return self.value

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < getattr(other, "value", other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > getattr(other, "value", other))


def _ones(*shape: int, dtype: str = "Float") -> Tensor:
    return Tensor(tuple(shape), dtype)


def _scalar(value: float) -> Tensor:
    return Tensor((), "Float", value)


def _isfinite(x: Any) -> bool:
    return math.isfinite(getattr(x, "value", x))


@dataclass
class _Rank:
    number: int
    ops: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    state: str = "run"
    error: BaseException | None = None
    thread: threading.Thread | None = None
    started: bool = False
    messages: int = 0  # gloo counts them in its sequence numbers
    ready: Any = None

    def rests(self) -> bool:
        """Whether it has ended, or waits for what is not there."""
        if self.state in {"finished", "failed"}:
            return True
        return self.state != "run" and not self.ready()


@dataclass(frozen=True)
class Handle:
    name: str
    members: tuple[int, ...]


class World:
    """Runs a program on some ranks until none moves.

    Args:
        folder: for the files.
        files: text by name; the first is the program. Each gets a first line that imports the make-believe torch.
        nproc: number of ranks.

    """

    def __init__(self, folder: Path, files: dict[str, str], nproc: int) -> None:
        self.nproc, self.folder = nproc, folder
        self.lock = threading.Condition()
        self.ranks = [_Rank(rank) for rank in range(nproc)]
        self.groups = {"0": Handle("0", tuple(range(nproc)))}
        self.made: list[dict[int, int]] = []
        self.messages: dict[tuple[int, int], list[str]] = {}
        self.closed = False
        self.clock = itertools.count(1)
        self.paths: dict[str, str] = {}
        for name, text in files.items():
            path = folder / name
            path.write_text("from fake import *\n" + textwrap.dedent(text).lstrip("\n"))
            self.paths[name] = str(path)
        self.program = next(iter(self.paths.values()))

    # What the program sees

    def _module(self) -> types.ModuleType:
        torch = types.SimpleNamespace(ones=_ones, scalar=_scalar, isfinite=_isfinite)
        dist = types.ModuleType("fake_dist")
        dist.__dict__.update(
            _work=self._work, _message=self._message, torch=torch, _size=lambda: self.nproc,
            _rank=lambda: _OURS.rank.number, new_group=self._new_group, isend=self._isend, irecv=self._irecv,
        )  # fmt: skip
        exec(compile(_DIST, _LIBRARY, "exec"), dist.__dict__)
        engine = types.ModuleType("fake_engine")
        exec(compile(_TRAINER, _ENGINE, "exec"), engine.__dict__)
        optimizer = types.ModuleType("fake_optimizer")
        exec(compile(_LBFGS, _OPTIMIZER, "exec"), optimizer.__dict__)
        fake = types.ModuleType("fake")
        store = types.SimpleNamespace(get=self._sleep, set=print)
        fake.__dict__.update(
            dist=dist, torch=torch, sleep=self._sleep, fit=engine.fit, queue=queue, store=store, threading=threading,
            minimize=optimizer.minimize, spin=self._spin, world=self, time=types.SimpleNamespace(sleep=self._sleep, time=time.time),
        )  # fmt: skip
        return fake

    def _sleep(self, *_: Any) -> None:
        self._wait(lambda: False, "sleep")

    def _spin(self, *_: Any) -> None:
        self._wait(lambda: False, "busy")

    def _wait(self, ready: Any, state: str) -> None:
        me: _Rank = _OURS.rank
        with self.lock:
            me.state, me.ready = state, ready
            self.lock.notify_all()
            while not ready():
                if self.closed:
                    raise _Closed
                self.lock.wait(0.5)
            me.state = "run"
            self.lock.notify_all()

    def _new_group(self, members: list[int]) -> Handle:
        me: _Rank = _OURS.rank
        count = me.asked.get("groups", 0) + 1
        me.asked["groups"] = count
        return self.groups.setdefault(str(count), Handle(str(count), tuple(members)))

    def _work(self, kind: str, x: Any, group: Handle | None, async_op: bool = False) -> Any:
        me: _Rank = _OURS.rank
        group = group or self.groups["0"]
        if me.number not in group.members:
            return None
        index = me.asked.get(group.name, 0) + 1
        sizes = (x.shape,) if x is not None else ()
        op = {
            "group": group, "index": index, "kind": kind, "sizes": sizes, "dtypes": (x.dtype,) if x is not None else (),
            "done": False, "frames": self._frames(sys._getframe(1), values=False), "time_ns": next(self.clock),
        }  # fmt: skip
        with self.lock:
            me.asked[group.name] = index
            me.ops.append(op)
            self.lock.notify_all()

        def ready() -> bool:
            for rank in group.members:
                twin = next((o for o in self.ranks[rank].ops if o["group"] is group and o["index"] == index), None)
                if twin is None or twin["kind"] != kind:
                    return False
                if math.prod(twin["sizes"][0] if twin["sizes"] else ()) != math.prod(sizes[0] if sizes else ()):
                    return kind == "all_gather"
            return True

        def wait() -> None:
            self._wait(ready, "op")
            op["done"] = True

        if async_op:
            return types.SimpleNamespace(wait=wait)
        wait()
        return None

    def _message(self, kind: str, peer: int) -> None:
        me = _OURS.rank.number
        _OURS.rank.messages += 1
        pair = (me, peer) if kind == "send" else (peer, me)
        other = "recv" if kind == "send" else "send"
        with self.lock:
            waiting = self.messages.setdefault(pair, [])
            if other in waiting:
                waiting.remove(other)
                self.lock.notify_all()
                return
            waiting.append(kind)
        self._wait(lambda: kind not in self.messages[pair], "op")

    def _isend(self, _: Any, dst: int) -> Any:
        return types.SimpleNamespace(wait=lambda: self._message("send", dst))

    def _irecv(self, _: Any, src: int) -> Any:
        return types.SimpleNamespace(wait=lambda: self._message("recv", src))

    # Running

    def run(self) -> World:
        fake = self._module()
        before = set(sys.modules)
        sys.modules["fake"] = fake
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            for name in list(self.paths)[1:]:
                importlib.import_module(Path(name).stem)
            code = compile(Path(self.program).read_text(), self.program, "exec")
            for rank in self.ranks:
                rank.thread = threading.Thread(target=self._main, args=(rank, code), daemon=True)
                rank.thread.start()
            self._settle()
        finally:
            sys.path.remove(str(self.folder))
            for name in set(sys.modules) - before | {"fake"}:
                if name == "fake" or getattr(sys.modules[name], "__file__", "") in self.paths.values():
                    sys.modules.pop(name, None)
        return self

    def _main(self, rank: _Rank, code: types.CodeType) -> None:
        _OURS.rank = rank
        rank.started = True
        try:
            exec(code, {"__name__": "__main__"})
            rank.state = "finished"
        except _Closed:
            pass
        except SystemExit as error:
            rank.error, rank.state = error, "finished"
        except BaseException as error:  # noqa: BLE001  # the program's own
            rank.error, rank.state = error, "failed"
        with self.lock:
            self.lock.notify_all()

    def _settle(self) -> None:
        """Until nobody moves: each has ended, waits here for what does not come, or stands at one instruction for long."""
        since = time.monotonic()
        last: Any = None
        while True:
            with self.lock:
                self.lock.wait(0.002)
                running = [rank for rank in self.ranks if not rank.rests()]
                if not running:
                    return
                now = self._marks(running)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > 0.3 and all(isinstance(mark, tuple) for mark in now):
                return

    def _marks(self, running: list[_Rank]) -> list[Any]:
        """Where ranks stand that wait for something of Python's own, a lock or a queue."""
        frames = sys._current_frames()
        marks: list[Any] = []
        for rank in running:
            frame = frames.get(rank.thread.ident or 0) if rank.thread and rank.state == "run" else None
            marks.append((id(frame), frame.f_lasti, len(rank.ops)) if frame and rank.started else object())
        return marks

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.lock.notify_all()

    # Views

    def _frames(self, frame: Any, *, values: bool) -> tuple[Frame, ...]:
        found = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename != __file__:
                user = code.co_filename in self.paths.values()
                texts = _texts(frame.f_locals) if values and user else {}
                name = getattr(code, "co_qualname", code.co_name) if values else code.co_name
                found.append(Frame(code.co_filename, frame.f_lineno, name, user, texts, frame.f_lasti))
            frame = frame.f_back
        return tuple(found)

    def views(self, *, still_s: float = 3.0, **processes: Process) -> list[View]:
        frames = sys._current_frames()
        errors: dict[int, Any] = sys._current_exceptions()
        errors = {thread: one[1] if isinstance(one, tuple) else one for thread, one in errors.items()}
        found = []
        for rank in self.ranks:
            alive = rank.state not in {"finished", "failed"}
            ident = rank.thread.ident if rank.thread else None
            stack = self._frames(frames.get(ident or 0), values=True) if alive else ()
            groups = tuple(
                Group(one.name, one.members, rank.asked.get(one.name, 0) + (rank.messages if one.name == "0" else 0))
                for one in self.groups.values()
                if rank.number in one.members
            )
            ended: Any = None if alive else rank.state
            beat = Beat(rank.number, 100 + rank.number, 10, 0.0, groups, stack, still_s, ended)
            ops = tuple(
                Op(
                    o["group"].name,
                    o["index"],
                    o["kind"],
                    o["sizes"],
                    o["dtypes"],
                    o["done"],
                    o["frames"],
                    o["time_ns"],
                )
                for o in rank.ops
            )
            raised = None
            if rank.error is not None:
                raised = Raised(type(rank.error).__name__, str(rank.error), self._traceback(rank.error))
            error = errors.get(ident or 0) if alive else None
            handled = (Raised(type(error).__name__, str(error), self._traceback(error)),) if error else ()
            snapshot = Snapshot(beat, ops, stack, handled, raised)
            code = None if alive else 0 if rank.state == "finished" else 1
            busy = rank.state == "busy"
            process = Process(alive, "R" if busy else "S" if alive else "", 1.0 if busy else 0.0, code)
            process = processes.get(f"rank{rank.number}", process)
            found.append(View(rank.number, "host", process, snapshot, 0.1, beat, 0.1))
        return found

    def _traceback(self, error: BaseException) -> tuple[Frame, ...]:
        found = []
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename != __file__:
                user = code.co_filename in self.paths.values()
                found.append(
                    Frame(code.co_filename, trace.tb_lineno, code.co_name, user, _texts(trace.tb_frame.f_locals))
                )
            trace = trace.tb_next
        return tuple(reversed(found))

    def marked(self) -> list[tuple[str, int]]:
        """The lines with the mark."""
        return [
            (path, number)
            for path in self.paths.values()
            for number, line in enumerate(Path(path).read_text().splitlines(), 1)
            if MARK in line
        ]


def _texts(values: dict[str, Any]) -> dict[str, str]:
    """As the recorder writes them."""
    skipped = (types.FunctionType, types.ModuleType, type)
    return {
        name: _text(one) for name, one in values.items() if not name.startswith("__") and not isinstance(one, skipped)
    }


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"float32 {list(value.shape)}" if value.shape else f"{value.value} (float32)"
    return texts.text_of(value)


def with_process(view: View, **changes: Any) -> View:
    return replace(view, process=replace(view.process, **changes))
