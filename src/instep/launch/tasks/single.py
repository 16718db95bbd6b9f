"""One rank in a process of its own: what a task of mpirun or srun starts, see :mod:`instep.launch.tasks.task`.

Started as ``python .../single.py FD RANK SCRIPT ARGS``: the script stands in its command line, for ``ps`` and
``pgrep``. FD is its socket to the task.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder; the rank puts the script's there

import os
import signal
import socket

from instep.launch.ranks import kin, rank
from instep.launch.ranks.job import receive_job


def main() -> None:
    """Take the job, and run its program as ``__main__``. The interpreter then ends as for any program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it would raise in the middle of our code
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    kin.die_with(os.getppid())
    job = receive_job(control)
    if job is None:
        os._exit(1)
    rank.run(job, int(sys.argv[2]))


if __name__ == "__main__":
    main()
