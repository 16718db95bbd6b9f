"""How OpenSSH is called, and what its words mean. The user's own configuration decides all that is not said here."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.world.hosts import Host

CONNECT_S = 10
_AGENT = "instep.launch.agents.agent"
_OPTIONS = {
    "BatchMode": "yes",  # nobody is asked for a password or about a key
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": "2",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a connection that is there already may be used; none is left behind
    "ForwardX11": "no",
    "ForwardAgent": "no",
    "ClearAllForwardings": "yes",  # what a user's configuration forwards is for logins
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "LogLevel": "ERROR",  # no banner
}


@dataclass(frozen=True)
class Way:
    """How the machines are reached.

    Attributes:
        ssh_config: what ``ssh -F`` is given; None for the user's own configuration.
        python: the interpreter there.

    """

    ssh_config: Path | None = None
    python: str = field(default_factory=lambda: sys.executable)

    def options(self, *, connect_s: float = CONNECT_S) -> list[str]:
        """``ssh`` and its options, for rsync too."""
        given = ["-F", str(self.ssh_config)] if self.ssh_config else []
        all_options = {**_OPTIONS, "ConnectTimeout": str(max(1, round(connect_s)))}
        return ["ssh", *given, *(word for name, value in all_options.items() for word in ("-o", f"{name}={value}"))]

    def agent(self, host: Host, marker: str, *, connect_s: float = CONNECT_S) -> list[str]:
        """The command that starts an agent there.

        The folder that it is started in comes first in Python's path: / holds no modules, a home may. ``env`` serves
        every login shell.
        """
        words = [*self.options(connect_s=connect_s), "--", host.name]
        return [*words, f"cd / && exec env INSTEP_JOB={marker} {shlex.quote(self.python)} -m {_AGENT}"]

    def child(self) -> list[str]:
        """The command of an agent on this machine."""
        return [self.python, "-m", _AGENT]


def is_here(host: Host) -> bool:
    """Whether the host is this machine, as far as can be seen without asking it."""
    user, _, name = host.name.rpartition("@")
    if user and user != os.environ.get("USER"):
        return False
    if host.address:
        return _is_own_address(host.address)
    own = socket.gethostname()
    if name in {"localhost", own, own.partition(".")[0]}:
        return True
    return any(_is_own_address(address) for address in (name, *_in_hosts_file(name)))


def _in_hosts_file(name: str) -> list[str]:
    """The addresses of a name, as far as this machine knows them without asking another: its own longer names."""
    try:
        lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
    except OSError:
        return []
    entries = [line.partition("#")[0].split() for line in lines]
    return [words[0] for words in entries if name in words[1:]]


def _is_own_address(text: str) -> bool:
    """Whether it is an address that this machine has: only such can be bound."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((text, 0))
        return True
    return False


# ---- what went wrong


def is_busy(words: Sequence[str]) -> bool:
    """Whether a server has hung up before it knew who calls: one that is called by many at once (MaxStartups) does.

    A gate that all machines are reached through is.
    """
    return any("exchange_identification" in line or "Connection reset by" in line for line in words)


_PROMPT = "check that it can be reached without a password:  {ssh} true"


def explain(host: str, status: int | None, words: Sequence[str], way: Way) -> RunError:
    """One error for an agent that did not come up.

    Args:
        host: the machine.
        status: of ssh; None where it was still trying.
        words: the last lines that ssh, or the other side, has said.
        way: how the machine was reached.

    """
    said = [f"ssh: {line.removeprefix('ssh: ')}" if status == 255 else line for line in words][-8:]
    given = f"ssh -F {shlex.quote(str(way.ssh_config))}" if way.ssh_config else "ssh"
    text = "\n".join(words)
    for pattern, what, cure in _KNOWN:
        if re.search(pattern, text) or (pattern == f"exit {status}"):
            names = {"host": host, "ssh": f"{given} {host}", "python": way.python, "given": given}
            return RunError(what.format(**names), evidence=said, cure=cure.format(**names))
    if status is None:
        return RunError(f"{host} has not answered in time", evidence=said, cure=_PROMPT.format(ssh=f"{given} {host}"))
    return RunError(
        f"no agent could be started on {host}",
        evidence=said or [f"ssh ended with exit code {status}"],
        cure=_PROMPT.format(ssh=f"{given} {host}"),
    )


# ssh's or the shell's words -> what is wrong, what mends it.
_KNOWN = (
    (
        r"Could not resolve hostname|Name or service not known",
        "there is no machine named {host}: neither a name server, nor /etc/hosts, nor the ssh configuration knows it",
        (
            "check the name; one that is not known by others belongs into ~/.ssh/config:\n"
            "  Host {host}\n    HostName ADDRESS"
        ),
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "the host key of {host} is not the one that is known: another machine answers there, or it was set up anew",
        (
            "look at its key on the machine's own console:  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
            "only if it was set up anew, forget the old one:  ssh-keygen -R {host}   and look at the new:  {ssh}"
        ),
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "the host key of {host} is not known here, so it may be anybody",
        (
            "connect once by hand and compare the fingerprint that it shows:  {ssh}\n"
            "with the one on the machine's own console:  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
        ),
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "{host} does not let you in without a password",
        (
            "make a key if there is none, and bring it there:  ssh-keygen -t ed25519 && ssh-copy-id {host}\n"
            "a key with a passphrase is opened once by:  ssh-add"
        ),
    ),
    (
        r"Connection refused",
        "{host} refuses connections of ssh",
        (
            "see that an ssh server runs there (sudo systemctl status ssh), and on which port: another one than 22\n"
            "stands in ~/.ssh/config"
        ),
    ),
    (
        r"Connection timed out|No route to host|Network is unreachable|Operation timed out",
        "{host} does not answer",
        "is it on, and on this network?  ping {host}",
    ),
    (
        r"exchange_identification",
        "{host}, or the gate before it, hangs up before it knows who calls",
        (
            "many logins at once? raise MaxStartups in /etc/ssh/sshd_config there\n"
            "or nobody is let in: see  sudo journalctl -u ssh  there, and /etc/hosts.deny"
        ),
    ),
    (
        r"No module named '?instep",
        "the Python on {host} has no instep",
        "install it there:  {ssh} {python} -m pip install instep\nor name a Python that has it:  --python PATH",
    ),
    (
        r"env: .*: No such file or directory",
        "there is no {python} on {host}",
        "make the environment there, at this path, or name another one:  --python PATH",
    ),
    (
        r"env: .*: Permission denied",
        "{python} on {host} cannot be started",
        "see what it is:  {ssh} ls -l {python}",
    ),
)


# ---- what the ranks find set


_MACHINES_OWN = {
    "HOME", "USER", "LOGNAME", "MAIL", "PWD", "OLDPWD", "SHELL", "SHLVL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP",
    "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "TERM", "COLORTERM", "LS_COLORS", "LINES", "COLUMNS", "_",
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "KRB5CCNAME", "INVOCATION_ID",
    "JOURNAL_STREAM", "SUDO_COMMAND", "SUDO_USER", "SUDO_UID", "SUDO_GID", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip
_OWN_BEGINNINGS = (
    "XDG_", "SSH_", "DBUS_", "TERM_", "TMUX", "STY", "SYSTEMD_", "SLURM_", "SLURMD_", "SRUN_", "OMPI_", "OPAL_",
    "PRTE_", "PMIX_", "PMI_", "PMI2_", "HYDRA_", "HYDI_", "I_MPI_", "MPI_", "PALS_", "FLUX_", "INSTEP_",
    "TORCHELASTIC_", "BASH_FUNC_",
)  # fmt: skip


def environment(environ: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """What of the launcher's variables the ranks on another machine get: not what belongs to a machine or a login.

    Args:
        environ: of the launcher.
        given: ``--env``: NAME=VALUE, or NAME for the launcher's own value of it.

    Raises:
        RunError: a name is none, or not set here.

    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _MACHINES_OWN and not name.startswith(_OWN_BEGINNINGS)
    }
    return kept | given_variables(environ, given)


def given_variables(environ: Mapping[str, str], given: Sequence[str]) -> dict[str, str]:
    """``--env``: NAME=VALUE, or NAME for the launcher's own value of it.

    Raises:
        RunError: a name is none, or not set here.

    """
    kept: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RunError(
                f"--env {text!r} names no variable", cure="give --env NAME=VALUE, or --env NAME for the value of here"
            )
        if not equals and name not in environ:
            raise RunError(f"--env {name}: it is not set here", cure=f"set it, or give its value:  --env {name}=VALUE")
        kept[name] = value if equals else environ[name]
    return kept
