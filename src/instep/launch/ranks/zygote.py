"""The fork server: imports torch once, forks every rank, and leaves nobody behind.

Started by the launcher as ``python .../zygote.py FD FD SCRIPT ARGS``: the script stands in its command line, and so in
that of every rank, for ``ps`` and ``pgrep``. The FDs are its socket to the launcher, and the one for reports of ranks.
It imports at once and waits for its job then: who needs more time to know the job has it.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder; the rank puts the script's there

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from instep.launch.ranks import kin, rank
from instep.launch.ranks.job import Job, receive, receive_job, send
from instep.launch.ranks.signals import ENDING, PASSED_ON


def main() -> None:
    """Serve one job. Returns in the ranks only, after the script: the interpreter then ends as for any program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for descriptor in (control.fileno(), int(sys.argv[2])):
        os.set_inheritable(descriptor, False)  # a rank's own children get the standard streams only
    kin.adopt_orphans()
    # Whoever signals all processes of a job (scancel, pkill -f) means the ranks. Without us they would be killed.
    ours = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, *PASSED_ON)}
    _preload()
    job = receive_job(control)
    if job is None:
        os._exit(1)
    number = _serve(control, job)
    for name, handler in ours.items():
        # Python's own handler for Ctrl-C would raise in the middle of our code: it waits until the script begins.
        signal.signal(name, signal.SIG_DFL if handler is signal.default_int_handler else handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
    rank.run(job, number)


def _preload() -> None:
    """Import what every rank will need. What fails here fails again in the rank, where the user sees it."""
    gc.disable()  # until the ranks have been forked: nothing is freed that leaves holes in shared pages
    with suppress(Exception):
        importlib.import_module("torch.distributed")
    if "INSTEP_GUARD" in os.environ:
        with suppress(Exception):
            importlib.import_module("instep.guard.recorder")
    gc.freeze()  # a collection in a rank does not touch, and so not copy, the pages shared by all


def _serve(control: socket.socket, job: Job) -> int:
    """Fork the ranks, tell the launcher of their ends, do what it asks. Returns in a rank, with its number."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    # A signal for a rank that does not yet stand on its own feet waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, *PASSED_ON))
    if "INSTEP_GUARD" in job.variables:
        os.environ["INSTEP_GUARD"] = job.variables["INSTEP_GUARD"]  # to be removed if nobody else is left to do it
    server = os.getpid()
    ranks: dict[int, int] = {}
    for number in job.place.ranks:
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, wake, woken):
                end.close()
            kin.die_with(server)
            return number
        ranks[pid] = number
    for descriptor in (job.report, *(one for pair in job.outputs for one in pair)):
        os.close(descriptor)
    _say(control, {"started": {str(number): pid for pid, number in ranks.items()}})
    while True:
        select.select([control, wake], [], [])
        with suppress(BlockingIOError):
            wake.recv(4096)
        for pid, status in kin.reap():
            if pid in ranks:
                gone = {"rank": ranks.pop(pid), "status": status, "time": time.monotonic()}
                _say(control, {"ended": gone})
        if select.select([control], [], [], 0)[0]:
            _obey(control, ranks)


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    """Tell the launcher; without a launcher there is nothing left to do but to end all."""
    try:
        send(control, message)
    except OSError:
        _end_all()


def _obey(control: socket.socket, ranks: dict[int, int]) -> None:
    """Carry out one command of the launcher."""
    command = receive(control)
    if command is None:
        _end_all()
    elif "signal" in command:
        for pid, number in ranks.items():  # not reaped yet, so each pid is still the rank's own
            if command["ranks"] is None or number in command["ranks"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, command["signal"])
    elif "sweep" in command:
        told = kin.end_descendants(*command["sweep"])
        _say(control, {"swept": told})
        os._exit(0)


def _end_all() -> None:
    """The launcher has gone: kill all ranks and whatever they started, then leave."""
    kin.end_descendants(0, 0)
    if "INSTEP_GUARD" in os.environ:
        shutil.rmtree(os.environ["INSTEP_GUARD"], ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
