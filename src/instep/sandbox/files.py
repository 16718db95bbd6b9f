"""The texts that a sandbox is made of: inventory, ssh, names, users, Slurm. Values in, texts out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.sandbox.state import Machine, Sandbox, User

KEYS = "/etc/ssh/instep"  # in a machine: one private key for each user who may go on to the next machine
WANTED = "/etc/systemd/system/multi-user.target.wants"
LOOPBACK = "127.0.1.1"  # what a stock Debian gives its own name
CPUS = 4  # what each machine has to give to Slurm, whatever this host has


@dataclass(frozen=True)
class File:
    """A file in a machine, or a link if `link` says where to."""

    text: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: str = ""


@dataclass(frozen=True)
class Secrets:
    """What only this sandbox knows.

    Attributes:
        private: the key that opens all machines, as ssh-keygen wrote it.
        public: its public half, one line.
        hosts: each machine's own key, as (private, public).
        munge: the key that Slurm's daemons share.

    """

    private: str
    public: str
    hosts: Mapping[str, tuple[str, str]]
    munge: str


def inventory(sandbox: Sandbox) -> str:
    """What ``instep run --inventory`` reads (TOML)."""
    lines = [
        f"# made by: {sandbox.command}",
        f"ssh_config = {json.dumps(str(sandbox.ssh_config))}",
        f"head = {json.dumps(sandbox.machines[0].name)}  # where mpirun, srun and sbatch are started",
    ]
    for machine in sandbox.machines:
        lines += ["", "[[machines]]", f'name = "{machine.name}"', f'address = "{machine.address}"', "slots = 2"]
    return "\n".join(lines) + "\n"


def ssh_config(sandbox: Sandbox) -> str:
    """How this host reaches the machines."""
    return "\n".join(_host_block(sandbox, machine) for machine in sandbox.machines)


def _host_block(sandbox: Sandbox, machine: Machine) -> str:
    return (
        f"Host {machine.name}\n"
        f"    HostName {machine.address}\n"
        f"    User {sandbox.user.name}\n"
        f'    IdentityFile "{sandbox.key}"\n'
        "    IdentitiesOnly yes\n"
        f'    UserKnownHostsFile "{sandbox.known_hosts}"\n'
        "    StrictHostKeyChecking yes\n"
        "    LogLevel ERROR\n"
        "    ConnectTimeout 10\n"
    )


def known_hosts(machines: Sequence[Machine], secrets: Secrets) -> str:
    """The machines' own keys, by name and by address."""
    lines = []
    for machine in machines:
        kind, key = secrets.hosts[machine.name][1].split()[:2]
        lines.append(f"{machine.name},{machine.address} {kind} {key}\n")
    return "".join(lines)


def hosts(sandbox: Sandbox, here: Machine) -> str:
    """``/etc/hosts`` of one machine."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for machine in sandbox.machines:
        own = sandbox.loopback_names and machine.name == here.name
        lines.append(f"{LOOPBACK if own else machine.address} {machine.name}")
    return "\n".join(lines) + "\n"


def slurm_conf(sandbox: Sandbox, memory_mb: int) -> str:
    """``slurm.conf``, the same on all machines, for Slurm 22.05 (bookworm) and 24.11 (trixie)."""
    head = sandbox.machines[0]
    nodes = "\n".join(
        f"NodeName={machine.name} NodeAddr={machine.address} CPUs={CPUS} RealMemory={memory_mb} State=UNKNOWN"
        for machine in sandbox.machines
    )
    return f"""\
# A practice cluster on one host: {sandbox.command}
ClusterName={sandbox.name}
SlurmctldHost={head.name}({head.address})
SlurmUser=slurm
AuthType=auth/munge
# A requeued job waits for as long as a credential lives.
AuthInfo=cred_expire=10
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
# No cgroups of their own: the machines are containers.
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# All machines are this one host: what is written below counts, not what slurmd sees.
SlurmdParameters=config_overrides
PriorityType=priority/basic
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=5
SlurmdTimeout=60
JobCompType=jobcomp/filetxt
JobCompLoc=/var/log/slurm/jobcomp.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


def cgroup_conf(release: str) -> str:
    """Slurm looks for no cgroups: 22.05 has no word for it, but version 1's start touches none."""
    return f"CgroupPlugin={'cgroup/v1' if release == 'bookworm' else 'disabled'}\n"


def accounts(sandbox: Sandbox, image: Mapping[str, str]) -> dict[str, File]:
    """The image's users, and the one who made the sandbox.

    Args:
        sandbox: whose user it is.
        image: the image's ``/etc/passwd``, ``/etc/group`` and ``/etc/shadow``.

    """
    user = sandbox.user
    if user.uid == 0:
        return {}
    passwd = _with(image["/etc/passwd"], user.name, f"x:{user.uid}:{user.gid}::{user.home}:/bin/bash")
    group = image["/etc/group"]
    if not any(line.split(":")[2] == str(user.gid) for line in group.splitlines()):
        group = _with(group, user.group, f"x:{user.gid}:")
    shadow = _with(image["/etc/shadow"], user.name, "*:19000:0:99999:7:::")
    return {
        "/etc/passwd": File(passwd),
        "/etc/group": File(group),
        "/etc/shadow": File(shadow, 0o640, gid=_id(image["/etc/group"], "shadow")),
    }


def _with(table: str, name: str, rest: str) -> str:
    kept = [line for line in table.splitlines() if line.split(":")[0] != name]
    return "\n".join([*kept, f"{name}:{rest}"]) + "\n"


def _id(table: str, name: str) -> int:
    """The third column of a passwd or group file."""
    return next(int(line.split(":")[2]) for line in table.splitlines() if line.split(":")[0] == name)


def machine(
    sandbox: Sandbox, here: Machine, secrets: Secrets, image: Mapping[str, str], memory_mb: int
) -> dict[str, File]:
    """All that one machine has and its image has not, by path."""
    private, public = secrets.hosts[here.name]
    files = {
        "/etc/hostname": File(f"{here.name}\n"),
        "/etc/machine-id": File(f"{here.machine_id}\n", 0o444),
        "/etc/hosts": File(hosts(sandbox, here)),
        # No name server can be reached, and whoever asks for a name shall be told at once that there is none.
        "/etc/nsswitch.conf": File("passwd: files\ngroup: files\nshadow: files\nhosts: files\n"),
        "/etc/ssh/ssh_host_ed25519_key": File(private, 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": File(public),
        "/etc/ssh/ssh_known_hosts": File(known_hosts(sandbox.machines, secrets)),
        "/etc/ssh/ssh_config.d/instep.conf": File(_onward(sandbox)),
        "/etc/ssh/sshd_config.d/instep.conf": File(_server()),
        # No machine tidies up its /tmp: folders of this host may be shown in there.
        "/etc/tmpfiles.d/tmp.conf": File("q /tmp 1777 root root -\nq /var/tmp 1777 root root -\n"),
        f"{KEYS}/authorized_keys": File(secrets.public),
        f"{KEYS}/root": File(secrets.private, 0o600),
        **accounts(sandbox, image),
    }
    if sandbox.user.uid != 0:
        files[f"{KEYS}/{sandbox.user.name}"] = _owned(sandbox.user, secrets.private)
    if sandbox.python:
        files["/usr/bin/python3"] = File(link=sandbox.python)
    if sandbox.slurm:
        files |= _slurm(sandbox, here, secrets, image, memory_mb)
    return files


def _owned(user: User, text: str) -> File:
    return File(text, 0o600, user.uid, user.gid)


def _server() -> str:
    return (
        "HostKey /etc/ssh/ssh_host_ed25519_key\n"
        f"AuthorizedKeysFile .ssh/authorized_keys {KEYS}/authorized_keys\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "UseDNS no\n"
    )


def _onward(sandbox: Sandbox) -> str:
    """From one machine to the next: with the key of whoever asks, which no home folder has to hold."""
    names = " ".join(f"{machine.name} {machine.address}" for machine in sandbox.machines)
    return f"Host {names}\n    IdentityFile {KEYS}/%u\n    StrictHostKeyChecking yes\n    LogLevel ERROR\n"


def _slurm(
    sandbox: Sandbox, here: Machine, secrets: Secrets, image: Mapping[str, str], memory_mb: int
) -> dict[str, File]:
    munge = _id(image["/etc/passwd"], "munge"), _id(image["/etc/group"], "munge")
    head = here.name == sandbox.machines[0].name
    units = ["munge", "slurmd", *(["slurmctld"] if head else [])]
    return {
        "/etc/munge/munge.key": File(secrets.munge, 0o400, *munge),
        "/etc/slurm/slurm.conf": File(slurm_conf(sandbox, memory_mb)),
        "/etc/slurm/cgroup.conf": File(cgroup_conf(sandbox.release)),
        **{f"{WANTED}/{unit}.service": File(link=f"/lib/systemd/system/{unit}.service") for unit in units},
    }
