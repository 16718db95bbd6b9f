"""The process on each machine that starts its ranks, passes on what they say, and leaves nobody behind.

``PYTHON -m instep.launch.agents.agent``: it obeys what comes by its standard input. When that ends, or nothing has come
for some seconds, the launcher is gone, and so are all that the agent has started.
"""

from __future__ import annotations

import base64
import os
import queue
import selectors
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep import __version__
from instep.errors import InstepError, RunError
from instep.launch.agents import PROTOCOL, SILENT_S
from instep.launch.agents.channel import FULL, Channel
from instep.launch.planning.place import Place
from instep.launch.planning.target import Target
from instep.launch.ranks import kin
from instep.launch.ranks.server import ForkServer, raise_file_limit
from instep.launch.ranks.signals import Signals

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping

    from instep.launch.agents.witnessing import Witnessing
    from instep.launch.preflight.meeting import Listener

_CHUNK = 1 << 16
_CHILD_S = (2.0, 6.0)  # after the launcher has gone: until a command is asked again to leave, and until it is killed


class Pipes:
    """What the ranks, or a command, write: passed on as messages while the launcher takes them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Readable when there is something to pass on."""
        return self._open.fileno()

    def make(self, rank: int) -> tuple[int, int]:
        """Two pipes; returns the ends to write to."""
        ends = []
        for stream in (1, 2):
            source, end = os.pipe()
            os.set_blocking(source, False)
            self._open.register(source, selectors.EVENT_READ, {"rank": rank, "stream": stream})
            ends.append(end)
        return ends[0], ends[1]

    def pump(self) -> bool:
        """Pass on what is there; False where there was nothing."""
        ready = self._open.select(0)
        for key, _ in ready:
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if data:
                self._channel.send({"output": {**key.data, "data": base64.b64encode(data).decode()}})
            else:
                self._close(key.fd)
        return bool(ready)

    def drain(self, limit_s: float = 0.5) -> None:
        """Pass on all that is there; one who never stops writing shall not keep us."""
        end = time.monotonic() + limit_s
        while self._open.get_map() and self.pump() and time.monotonic() < end:
            pass

    def close(self) -> None:
        """Pass on the rest, and stop even if somebody still holds a pipe."""
        self.drain()
        for key in list(self._open.get_map().values()):
            self._close(key.fd)

    def _close(self, source: int) -> None:
        self._open.unregister(source)
        os.close(source)


class Agent:
    """Serves one launcher."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._pipes = Pipes(channel)
        self._given: dict[str, Any] = {}
        self._environ: dict[str, str] = dict(os.environ)
        self._server: ForkServer | None = None
        self._preset: dict[str, str] = {}
        self._most_files = 0
        self._listener: Listener | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._witnessing: Witnessing | None = None
        self._is_paused = False
        self._is_pumping = True
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        self._deeds: Mapping[str, Callable[[Any], None]] = {
            "hello": self._hello,
            "look": self._look,
            "listen": self._listen,
            "reach": self._reach,
            "start": self._start,
            "signal": self._signal,
            "sweep": self._sweep,
            "kill": self._kill,
            "again": self._prefork,
            "ping": self._pong,
            "pause": self._pause,
            "execute": self._execute,
            "end": self._end,
            "guard": self._see,
        }
        self._selector.register(channel.source, selectors.EVENT_READ, self._obey)
        self._selector.register(self._wake, selectors.EVENT_READ, self._tell_answers)
        self._selector.register(self._pipes, selectors.EVENT_READ, self._pipes.pump)

    def serve(self) -> None:
        """Obey until the launcher says that this is the end, or has gone."""
        with Signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ, partial(self._pass_on, signals))
            while not self._channel.is_closed and not self._is_silent():
                self._mind_the_flow()
                for key, _ in self._selector.select(self._pause_s()):
                    if key.fd in self._selector.get_map():
                        key.data()
                self._look_after_child()
                if self._witnessing is not None:
                    self._witnessing.tick(time.monotonic())
            self._leave(1)

    def _pause_s(self) -> float:
        longest = 0.1 if self._child else 1.0
        if self._witnessing is None:
            return longest
        return max(0.0, min(longest, self._witnessing.next_at - time.monotonic()))

    def _is_silent(self) -> bool:
        if self._is_paused or time.monotonic() - self._channel.heard_at < SILENT_S:
            return False
        self._obey()  # we may have been stopped, or starved, ourselves
        return time.monotonic() - self._channel.heard_at >= SILENT_S

    def _mind_the_flow(self) -> None:
        """While the launcher does not take what was said, the ranks have to wait; our own short words do not."""
        waiting = self._channel.waiting
        watched = self._channel.sink in self._selector.get_map()
        if waiting and not watched:
            self._selector.register(self._channel.sink, selectors.EVENT_WRITE, self._channel.flush)
        elif watched and not waiting:
            self._selector.unregister(self._channel.sink)
        if self._is_pumping != (waiting < FULL):
            self._is_pumping = not self._is_pumping
            if self._is_pumping:
                self._selector.register(self._pipes, selectors.EVENT_READ, self._pipes.pump)
            else:
                self._selector.unregister(self._pipes)

    # What the launcher says

    def _obey(self) -> None:
        for message in self._channel.receive():
            ((kind, told),) = message.items()
            try:
                self._deeds[kind](told)
            except InstepError as error:
                self._say_error(error)
            except Exception as error:  # noqa: BLE001  # whatever ails us, the launcher shall hear of it
                self._say_error(error)

    def _say_error(self, error: Exception) -> None:
        known = isinstance(error, InstepError)
        said = {
            "what": error.what if isinstance(error, InstepError) else f"{type(error).__name__}: {error}",
            "evidence": list(error.evidence) if isinstance(error, InstepError) else [],
            "cure": error.cure if isinstance(error, InstepError) else "",
        }
        self._channel.send({"error": {**said, "known": known}})

    def _hello(self, given: dict[str, Any]) -> None:
        """Who we are; and the fork server may begin, since it needs longest."""
        self._given = given
        self._channel.send({"hello": {"protocol": PROTOCOL, "version": __version__, "python": sys.executable}})
        if given["protocol"] != PROTOCOL:
            return
        self._environ.update(given["environ"])
        self._environ["PWD"] = given["cwd"]
        if given.get("target"):
            self._prefork()

    def _prefork(self, _: object = None) -> None:
        """Start the fork server with the variables that the plan will have, as far as can be seen from here."""
        from instep.launch.planning.machine import this_machine
        from instep.launch.planning.plan import Request, Site, make_plan

        if self._server is not None:  # a spare machine: it waits for its first job
            return
        given = self._given
        kind, name, arguments = given["target"]
        target = Target(kind, name, tuple(arguments))
        site = Site(given["host"], this_machine(self._environ), given["slots"])
        if not Path(given["cwd"]).is_dir():  # the look at this machine will say so; --sync may make it
            return
        with suppress(InstepError):  # it will be said by the launcher, who makes the plan
            plan = make_plan(Request(target, given["nproc"], given["device"]), [site], given["environ"])
            self._start_server(target, dict(plan.nodes[0].variables), plan.world_size)

    def _start_server(self, target: Target, preset: dict[str, str], ranks: int) -> None:
        self._drop_server()
        self._most_files = self._most_files or raise_file_limit(ranks)
        self._preset = preset
        environ = {**self._environ, **preset}
        if self._given.get("guard"):
            environ["INSTEP_GUARD"] = ""  # its recorder is imported once; the folder comes with the job
        self._server = ForkServer(
            target, host=self._given["host"], environ=environ, cwd=self._given["cwd"], reads_stdin=False
        )
        for descriptor in self._server.descriptors():
            self._selector.register(descriptor, selectors.EVENT_READ, self._hear)

    def _drop_server(self) -> None:
        """End the fork server, if there is one."""
        if self._server is not None:
            self._forget_server().kill()

    def _forget_server(self) -> ForkServer:
        server, self._server = self._server, None
        assert server is not None
        for key in [key for key in self._selector.get_map().values() if key.data == self._hear]:
            self._selector.unregister(key.fd)
        return server

    def _look(self, asked: dict[str, Any]) -> None:
        from instep.launch.preflight import facts

        self._later("facts", partial(facts.gather, asked))

    def _listen(self, told: dict[str, Any]) -> None:
        from instep.launch.preflight.meeting import Listener

        self._stop_listening()
        ports = told.get("ports")
        self._listener = Listener(told["token"], ports=(ports[0], ports[1]) if ports else None, key=told.get("key", ""))
        self._channel.send({"listening": self._listener.port})

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _reach(self, peers: list[dict[str, Any]]) -> None:
        from instep.launch.preflight import meeting

        self._later("reached", partial(meeting.reach, peers))

    def _later(self, kind: str, work: Callable[[], Any]) -> None:
        """Do what may take long (a dead file system, a dead network) on a thread, so that pings are still answered."""

        def do() -> None:
            try:
                answer = {kind: work()}
            except Exception as error:  # noqa: BLE001
                answer = {"error": {"what": f"{type(error).__name__}: {error}", "evidence": [], "cure": ""}}
            self._answers.put(answer)
            os.write(self._woken, b".")

        threading.Thread(target=do, daemon=True).start()

    def _tell_answers(self) -> None:
        os.read(self._wake, 4096)
        while not self._answers.empty():
            self._channel.send(self._answers.get())

    def _start(self, told: dict[str, Any]) -> None:
        """Let the fork server make the ranks."""
        place, variables = Place(**told["place"]), told["variables"]
        if self._listener is not None:
            self._listener.release()
        kind, name, arguments = self._given["target"]
        stale = any(variables.get(key) != value for key, value in self._preset.items())
        if self._server is None or stale:  # guessed wrong, or the folder was not there then
            self._start_server(Target(kind, name, tuple(arguments)), variables, place.count)
        assert self._server is not None
        folder = Path(told["folder"])
        with suppress(OSError):  # where each machine has its own copy, it has its own run folder, too
            (folder / "log").mkdir(parents=True, exist_ok=True)
        watched = self._begin_witnessing(place, told["restart"])
        outputs = [self._pipes.make(rank) for rank in place.ranks]
        self._server.start(
            place=place,
            port=told["port"],
            marker=self._environ["INSTEP_JOB"],
            folder=folder,
            outputs=outputs,
            most_files=self._most_files,
            restarts=(told["restart"], told["max_restarts"]),
            variables={**variables, **watched, "INSTEP_RUN": str(folder)},
        )
        for end in (end for pair in outputs for end in pair):
            os.close(end)

    def _begin_witnessing(self, place: Place, restart: int) -> dict[str, str]:
        """Let the launcher's guard see the ranks; returns the variables that their recorders need."""
        self._end_witnessing()
        if not self._given.get("guard") or place.world_size == 1:
            return {}
        from instep.launch.agents.witnessing import Witnessing

        try:
            self._witnessing = Witnessing(place, self._given["host"], restart, self._channel)
        except OSError as error:
            print(f"the ranks are not watched: no folder for their records ({error})", file=sys.stderr, flush=True)
            return {}
        return {"INSTEP_GUARD": str(self._witnessing.folder)}

    def _end_witnessing(self) -> None:
        if self._witnessing is not None:
            self._witnessing.close()
            self._witnessing = None

    def _see(self, told: list[Any]) -> None:
        """The guard wants to know something."""
        if self._witnessing is not None:
            self._witnessing.take(told)

    def _signal(self, told: dict[str, Any]) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(told["number"])
        if self._server is not None:
            self._server.signal(told["number"], told["ranks"])

    def _sweep(self, told: list[float]) -> None:
        if self._server is None:
            self._channel.send({"swept": []})
        else:
            self._server.sweep(*told)

    def _kill(self, _: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._hear()

    def _pong(self, sent: float) -> None:
        self._channel.send({"pong": [sent, time.monotonic()]})

    def _pause(self, on: bool) -> None:
        """The launcher was stopped (Ctrl-Z), or goes on."""
        self._is_paused = on

    def _execute(self, told: dict[str, Any]) -> None:
        """Run a command as the launcher's terminal would."""
        import subprocess

        if not Path(self._given["cwd"]).is_dir():
            raise RunError(
                f"there is no folder {self._given['cwd']} on {self._given['host']}",
                cure="start from a folder that the machines share",
            )
        out, err = self._pipes.make(0)
        try:
            self._child = subprocess.Popen(
                told["argv"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self._given["cwd"],
                env=self._environ,
                start_new_session=True,
            )
        finally:
            os.close(out)
            os.close(err)

    def _end(self, _: object) -> None:
        self._leave(0)

    # What the others say

    def _pass_on(self, signals: Signals) -> None:
        """Whoever signals all processes of a job (scancel, pkill -f) means the ranks."""
        for number in signals.take():
            if number != signal.SIGWINCH:
                self._signal({"number": number, "ranks": None})

    def _hear(self) -> None:
        """The fork server: what its ranks wrote before goes first."""
        assert self._server is not None
        found = self._server.hear()
        if found:
            self._pipes.drain()
        for message in found:
            self._see_ranks(message)
            if message.keys() & {"swept", "lost"}:
                self._end_witnessing()
                server = self._forget_server()
                if "swept" in message:
                    server.end()
                self._pipes.close()
                self._stop_listening()
                self._channel.send(message)
                return  # what comes after "swept" is that the server has left
            self._channel.send(message)

    def _see_ranks(self, message: Mapping[str, Any]) -> None:
        """What the guard has to know of them, before the launcher hears of it."""
        if self._witnessing is None:
            return
        if "started" in message:
            self._witnessing.started(message["started"])
        elif "ended" in message:
            rank = message["ended"]["rank"]
            text = self._witnessing.ended(rank, message["ended"]["status"])
            if text:
                data = base64.b64encode(text).decode()
                self._channel.send({"output": {"rank": rank, "stream": 2, "data": data}})

    def _look_after_child(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            status, self._child = self._child.returncode, None
            told = kin.end_descendants(1.0, 1.0)
            self._pipes.close()
            self._channel.send({"exited": {"status": status, "left": told}})

    # The end

    def _leave(self, code: int) -> None:
        """End all that we have started, and ourselves."""
        self._end_child()
        if self._server is not None:
            self._server.kill()
        kin.end_descendants(0, 0)
        self._end_witnessing()
        self._channel.flush()
        os._exit(code)

    def _end_child(self) -> None:
        """A command that is a launcher itself needs a moment to end its own."""
        child, begin = self._child, time.monotonic()
        if child is None:
            return
        asked = 0
        while child.poll() is None and (waited := time.monotonic() - begin) < _CHILD_S[1]:
            if asked < (1 if waited < _CHILD_S[0] else 2):
                asked += 1
                child.terminate()
            time.sleep(0.05)
        child.kill()


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    if sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder where we were started
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # whatever is printed here by accident is no message
    kin.adopt_orphans()
    Agent(Channel(source, sink)).serve()


if __name__ == "__main__":
    main()
