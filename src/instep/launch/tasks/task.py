"""What mpirun or srun starts, once for each rank: it calls the launcher, starts the rank when told, and watches it.

Started as ``python -m instep.launch.tasks.task``. Which rank it is, the variables of MPI or Slurm say; where the
launcher is, INSTEP_TASK does. The rank is its child, as a shell script would have one, and finds MPI's variables and
descriptors as this process found them: it may call MPI. It does not outlive this process, nor this process its
connection. No torch.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # with -m it is the working folder, whose files are the user's

import base64
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from instep.errors import InstepError
from instep.launch.planning.place import Place
from instep.launch.ranks import kin
from instep.launch.ranks.job import LARGEST, Job, send_job
from instep.launch.ranks.signals import ENDING, PASSED_ON, would_end
from instep.launch.tasks.link import FULL, Link, connect
from instep.runs.launcher import this_machine_id
from instep.world.launchers import mpi, slurm
from instep.world.reading import Reading

VARIABLE = "INSTEP_TASK"
_CONNECT_S = 10.0
_CHUNK = 1 << 15
_LOOK_S = 1.0
_DAEMONS = {"orted", "prted", "hydra_pmi_proxy"}  # names are cut after 15 characters, and these are not longer


def main() -> None:
    """Serve one rank."""
    told = json.loads(os.environ.pop(VARIABLE))
    # Whoever signals all processes of a job (scancel, mpirun that is told to end) means the ranks.
    for number in (*ENDING, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    kin.adopt_orphans()
    link, whys = connect([(address, told["port"]) for address in told["at"]], told["key"], who(os.environ), _CONNECT_S)
    if link is None:
        print(
            f"✗ {socket.gethostname()} does not reach the launcher on {told['host']}, port {told['port']}",
            *(f"  {address}: {why}" for address, why in whys.items()),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)
    Task(link).serve()


def who(environ: Mapping[str, str]) -> dict[str, Any]:
    """What this process says of itself: which rank its launcher has made it, and where it is."""
    me: dict[str, Any] = {"host": socket.gethostname(), "machine": this_machine_id(), "pid": os.getpid(), "why": ""}
    try:
        found = mpi.read(environ) or slurm.read(environ)
    except InstepError as error:
        return {**me, "rank": -1, "why": str(error)}
    if not isinstance(found, Reading):
        why = str(found.error) if found else "no variable of mpirun or srun says which rank this is"
        return {**me, "rank": -1, "why": why}
    return {**me, "rank": found.rank, "world_size": found.world_size, "local_rank": found.local_rank}


def _end_daemon() -> None:
    """The launcher has gone, or is out of reach: so is mpirun, but its daemon here may not notice for minutes."""
    parent = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() not in _DAEMONS:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 1.0
            os.kill(parent, number)
            while os.getppid() == parent and time.monotonic() < end:
                time.sleep(0.02)
            if os.getppid() != parent:
                return


class Task:
    """One rank, and the launcher to whom all of it is told."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._rank: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, int] = {}  # descriptor: 1 or 2
        self._reports: socket.socket | None = None
        self._listener: Any = None
        self._witnessing: Any = None  # the guard's eyes on this machine: one of its tasks has them
        self._is_held = False  # the ranks' output waits
        self._early: list[int] = []  # signals for a rank that has not set its handler yet
        self._wake, woken = socket.socketpair()
        for end in (self._wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._woken = woken
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)
        self._selector.register(link, selectors.EVENT_READ, self._hear)

    def serve(self) -> None:
        """Until the launcher says that it is over, or goes."""
        self._hear()
        while not self._link.is_closed:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.waiting else 0)
            self._selector.modify(self._link, wanted, self._hear)
            for key, _ in self._selector.select(self._timeout()):
                if key.fd in self._selector.get_map():
                    key.data()
                if self._link.is_closed:
                    break
            self._link.look()
            self._hold_back()
            if self._witnessing is not None:
                self._witnessing.tick(time.monotonic())
            early, self._early = self._early, []
            for number in early:
                self._do_signal(number)
        kin.end_descendants(0, 0)
        self._end_witnessing()
        _end_daemon()
        sys.exit(1)

    def _timeout(self) -> float:
        if self._witnessing is None:
            return _LOOK_S
        return max(0.0, min(_LOOK_S, float(self._witnessing.next_at) - time.monotonic()))

    def _end_witnessing(self) -> None:
        if self._witnessing is not None:
            self._witnessing.close()
            self._witnessing = None

    def _hold_back(self) -> None:
        """Where the launcher takes nothing (it was stopped, or its screen was), let the rank wait as at a full pipe."""
        is_full = self._link.waiting > FULL
        if is_full == self._is_held:
            return
        self._is_held = is_full
        for source in self._outputs:
            if is_full:
                self._selector.unregister(source)
            else:
                self._selector.register(source, selectors.EVENT_READ, partial(self._pass_on, source))

    # What the launcher asks for

    def _hear(self) -> None:
        self._link.flush()
        for message in self._link.receive():
            ((kind, told),) = message.items()
            getattr(self, f"_do_{kind}")(told)

    def _do_ask(self, told: list[Any]) -> None:
        number, kind, value = told
        self._link.send({"answer": [number, self._answer(kind, value)]})

    def _answer(self, kind: str, value: Any) -> Any:
        from instep.launch.preflight import facts, meeting

        if kind == "clock":
            return time.monotonic()
        if kind == "look":
            return facts.gather(value)
        if kind == "watch":
            return self._watch(value)
        if kind == "listen":
            ports = (value["ports"][0], value["ports"][1]) if value["ports"] else None
            try:
                self._listener = meeting.Listener(value["token"], ports=ports, key=value["key"])
            except InstepError as error:
                return {"error": [error.what, list(error.evidence), error.cure]}
            return {"port": self._listener.port}
        return meeting.reach(value)

    def _watch(self, told: Mapping[str, Any]) -> dict[str, str]:
        """Let the launcher's guard see the ranks of this machine; the folder for their records."""
        from instep.launch.agents.witnessing import Witnessing

        try:
            self._witnessing = Witnessing(Place(**told["place"]), told["host"], 0, self._link)
        except OSError as error:
            return {"why": str(error)}
        return {"folder": str(self._witnessing.folder)}

    def _do_guard(self, told: Any) -> None:
        """The guard wants to know something."""
        if self._witnessing is not None:
            self._witnessing.take(told)

    def _do_all_started(self, pids: Mapping[str, int]) -> None:
        """The ranks of this machine."""
        if self._witnessing is not None:
            self._witnessing.started(pids)

    def _do_one_ended(self, told: Sequence[int]) -> None:
        """One of the ranks of this machine."""
        if self._witnessing is not None and (text := self._witnessing.ended(*told)):
            self._link.send({"fatal": [told[0], base64.b64encode(text).decode()]})

    def _do_start(self, told: dict[str, Any]) -> None:
        """Start the rank."""
        if self._listener is not None:
            self._listener.release()  # the port stays reserved
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        job = Job(
            kind=told["kind"],
            name=told["name"],
            arguments=tuple(told["arguments"]),
            place=Place(**told["place"]),
            port=told["port"],
            marker=told["marker"],
            folder=told["folder"],
            report=far.fileno(),
            outputs=((out_end, err_end),),
            most_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
        try:
            self._rank = _start(job, told, far)
        except OSError as error:
            self._link.send({"failed": f"the rank cannot be started: {error}"})
            return
        send_job(near, job)
        for end in (out_end, err_end):
            os.close(end)
        far.close()
        self._reports = near
        self._selector.register(near, selectors.EVENT_READ, self._report)
        for stream, source in ((1, out), (2, err)):
            os.set_blocking(source, False)
            self._outputs[source] = stream
            self._selector.register(source, selectors.EVENT_READ, partial(self._pass_on, source))
        self._link.send({"started": self._rank.pid})

    def _do_signal(self, number: int) -> None:
        if self._rank is not None and self._rank.returncode is None:  # not reaped yet: the pid is still the rank's own
            if number in PASSED_ON and would_end(self._rank.pid, number):
                self._early.append(number)  # it says "save and leave", and is not meant to kill
                return
            with suppress(ProcessLookupError):
                os.kill(self._rank.pid, number)

    def _do_sweep(self, told: list[float]) -> None:
        patience, kind = told
        names = kin.end_descendants(patience, kind)
        self._end_witnessing()
        self._link.send({"swept": names})
        end = time.monotonic() + 2.0
        while self._link.waiting and not self._link.is_closed and time.monotonic() < end:
            time.sleep(0.01)
            self._link.flush()
        os._exit(0)

    # What the rank does

    def _pass_on(self, source: int) -> bool:
        """Send what the rank has written; False where there is nothing."""
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            with suppress(KeyError):
                self._selector.unregister(source)
            del self._outputs[source]
            os.close(source)
            return False
        self._link.send({"output": [self._outputs[source], base64.b64encode(data).decode()]})
        return True

    def _report(self) -> bool:
        """Send what the rank has told; False where there is nothing."""
        assert self._reports is not None
        try:
            data = self._reports.recv(LARGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            with suppress(KeyError):
                self._selector.unregister(self._reports)
            return False
        self._link.send({"report": json.loads(data)})
        return True

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        now = time.monotonic()
        for pid, status in kin.reap():
            if self._rank is not None and pid == self._rank.pid:
                self._rank.returncode = status
                while self._report():
                    pass
                for source in list(self._outputs):
                    while source in self._outputs and self._pass_on(source):
                        pass
                self._link.send({"ended": [status, now]})


def _start(job: Job, told: Mapping[str, Any], control: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process that becomes the rank.

    Raises:
        OSError: it cannot be started.

    """
    switch = ["-m"] if job.kind == "module" else []
    program = str(Path(__file__).with_name("single.py"))
    os.set_inheritable(control.fileno(), True)
    return subprocess.Popen(
        [sys.executable, program, str(control.fileno()), str(told["rank"]), *switch, job.name, *job.arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **told["environ"]},
        cwd=told["cwd"],
        close_fds=False,  # MPICH and Slurm leave a descriptor for MPI; all of ours are closed by exec
    )


if __name__ == "__main__":
    main()
