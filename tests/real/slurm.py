"""A real Slurm for tests: a head machine with slurmctld and munged, and compute nodes with a slurmd each."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real.hosts import Host, hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.commands import Result

TOOLS = ("munged", "slurmctld", "slurmd", "scontrol")

CONFIG = """
ClusterName=instep-test
SlurmctldHost={head}({head_addr})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire={requeue_s}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
TmpFS={dir}/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PriorityType=priority/basic
SchedulerType=sched/builtin
ReturnToService=2
KillWait=5
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{extra}
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={addr} CPUs={cpus} RealMemory=1000 State=UNKNOWN"


@dataclass(frozen=True)
class Cluster:
    """The cluster, seen from its head."""

    head: Host
    nodes: tuple[Host, ...]
    dir: Path

    def run(
        self,
        command: Sequence[str | Path],
        *,
        limit_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str = "",
    ) -> Result:
        """Run a command on the head, which knows the cluster's configuration."""
        env = {"SLURM_CONF": str(self.dir / "slurm.conf"), **(env or {})}
        return self.head.run(command, limit_s=limit_s, env=env, cwd=cwd, stdin=stdin)

    def logs(self) -> str:
        """The last words of the daemons."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.dir.glob("*.log")))


@contextmanager
def cluster(
    names: Sequence[str] = ("n1", "n2"), *, cpus: int = 4, extra: str = "", requeue_s: int = 120
) -> Iterator[Cluster]:
    """A cluster that takes jobs; its daemons and machines are gone at the end.

    Args:
        names: the compute nodes.
        cpus: what each node has to give, whatever this machine has.
        extra: more lines for ``slurm.conf``.
        requeue_s: after how many seconds a requeued job may start again: the life of a credential, at least 5.

    """
    folder = Path(tempfile.mkdtemp(prefix="instep-slurm-"))
    try:
        with hosts(["head", *names]) as (head, *nodes):
            made = Cluster(head, tuple(nodes), folder)
            _configure(made, cpus, extra, requeue_s)
            _start(made)
            yield made
    finally:
        shutil.rmtree(folder)


def _configure(made: Cluster, cpus: int, extra: str, requeue_s: int) -> None:
    folder = made.dir
    folder.chmod(0o755)
    for name in ["state", *(node.name for node in made.nodes)]:
        (folder / name).mkdir()
    nodes = "\n".join(NODE.format(name=node.name, addr=node.addr, cpus=cpus) for node in made.nodes)
    places = {"head": made.head.name, "head_addr": made.head.addr, "dir": folder}
    text = CONFIG.format(**places, nodes=nodes, extra=extra, requeue_s=requeue_s)
    (folder / "slurm.conf").write_text(text)
    # Without systemd a namespace has no cgroup tree of its own; v1's start touches nothing.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(made: Cluster) -> None:
    folder = made.dir
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    _daemon(made.head, ["munged", "--force", f"--key-file={folder}/munge.key", *munge], folder)
    _daemon(made.head, ["slurmctld", "-f", folder / "slurm.conf"], folder)
    for node in made.nodes:
        _daemon(node, ["slurmd", "-N", node.name, "-f", folder / "slurm.conf"], folder)
    deadline = time.monotonic() + 30
    while True:
        states = made.run(["sinfo", "--noheader", "--Node", "-o", "%N %T"], limit_s=20)  # one line in each partition
        if {*states.out.splitlines()} == {f"{node.name} idle" for node in made.nodes}:
            return
        assert time.monotonic() < deadline, f"the nodes did not come up\n{states}\n{made.logs()}"
        time.sleep(0.1)


def _daemon(host: Host, argv: Sequence[str | Path], folder: Path) -> None:
    """Start a program that goes to the background by itself; it ends with its machine."""
    done = subprocess.run(host.argv(argv, cwd=folder), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{argv[0]}: {done.stdout}{done.stderr}"
