"""Which mpirun this is, and the flags by which it starts ranks on chosen machines, each with its reason.

All is pure but :func:`find`.

Sources: mpirun(1) of Open MPI 4.1 and 5.0, prterun(1), mpiexec(1) of MPICH 4 (Hydra), Intel MPI's Developer Reference;
checked against the first three for real. Intel MPI's was never tried.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Debian keeps each MPI's own under a name of its own; the plain names belong to whatever the administrator chose.
_PROGRAMS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra")
_INSTALL = """\
install one on all machines:  sudo apt-get install openmpi-bin      (or: sudo apt-get install mpich)
or load the site's:           module load openmpi
or do without:                instep run --via ssh ..."""


@dataclass(frozen=True)
class Flavour:
    """An mpirun.

    Attributes:
        kind: "openmpi", "mpich" or "intelmpi".
        version: major, minor, ...
        program: what is started.

    """

    kind: str
    version: tuple[int, ...]
    program: str = "mpirun"

    @property
    def title(self) -> str:
        """For people."""
        names = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
        return f"{names[self.kind]} {'.'.join(map(str, self.version))}"


OPENMPI_4, OPENMPI_5 = Flavour("openmpi", (4, 1)), Flavour("openmpi", (5, 0))
MPICH_4 = Flavour("mpich", (4, 0), "mpiexec")


@dataclass(frozen=True)
class Flag:
    """Words of a command line that belong together, and why they are there."""

    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Network:
    """The network between the machines.

    Attributes:
        subnet: with its prefix length: ``10.77.0.0/24``; "" where it is left to mpirun.
        interface: its name on the machine where mpirun is started.
        ssh_config: handed to ``ssh -F``; None for the user's own configuration.
        ssh_program: a file that runs ssh with that configuration, for those who take a file only.
        is_slurm: mpirun is started inside a Slurm allocation.

    """

    subnet: str = ""
    interface: str = ""
    ssh_config: Path | None = None
    ssh_program: Path | None = None
    is_slurm: bool = False


def read_version(text: str, program: str = "mpirun") -> Flavour | None:
    """Whose mpirun says this at ``--version``; None for one that is not known."""
    patterns = (
        ("openmpi", r"\((?:Open ?MPI|OpenRTE|PRRTE)\)\s+v?(\d+(?:\.\d+)*)"),
        ("intelmpi", r"Intel\(R\) MPI Library.*?Version\s+(\d+(?:\.\d+)*)"),
        ("mpich", r"HYDRA build details:\s+Version:\s+(\d+(?:\.\d+)*)"),
    )
    for kind, pattern in patterns:
        if found := re.search(pattern, text, re.DOTALL):
            return Flavour(kind, tuple(map(int, found[1].split("."))), program)
    return None


def find(wanted: str = "") -> Flavour:
    """Look for an mpirun on this machine, and ask it who it is.

    Args:
        wanted: a program or its path; "" takes the first that is found.

    Raises:
        RunError: there is none, or none that is known.

    """
    names = [wanted] if wanted else _PROGRAMS
    programs = [path for name in names if (path := shutil.which(name))]
    if not programs:
        looked = wanted or ", ".join(_PROGRAMS)
        raise RunError(
            f"there is no {'such program' if wanted else 'mpirun'} on this machine",
            evidence=[f"looked for {looked} in PATH={os.environ.get('PATH', '')}"],
            cure=_INSTALL,
        )
    try:
        done = subprocess.run(
            [programs[0], "--version"], capture_output=True, text=True, timeout=20, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(
            f"{programs[0]} does not say its version", evidence=[str(error)], cure="name another one:  --mpirun PROGRAM"
        ) from error
    flavour = read_version(done.stdout + done.stderr, programs[0])
    if flavour is None:
        said = (done.stdout + done.stderr).strip().splitlines()[:3]
        raise RunError(
            f"{programs[0]} is not known: neither Open MPI nor MPICH nor Intel MPI",
            evidence=said or ["it says nothing at --version"],
            cure="name another one:  --mpirun PROGRAM      or do without:  --via ssh",
        )
    return flavour


def check_names(names: Sequence[str]) -> None:
    """See that every machine has a name that mpirun can be given.

    Raises:
        RunError: one has a user's name or is an IPv6 address.

    """
    for name in names:
        if "@" in name:
            user, _, host = name.partition("@")
            raise RunError(
                f"mpirun cannot be told another user: {name}",
                cure=f"let ssh know it, in ~/.ssh/config:\nHost {host}\n    User {user}",
            )
        if ":" in name:
            raise RunError(
                f"mpirun cannot be given an IPv6 address: {name}",
                cure=f"let ssh know it by a name, in ~/.ssh/config:\nHost n1\n    HostName {name}",
            )


def flags(
    flavour: Flavour,
    hosts: Sequence[tuple[str, int]],
    *,
    network: Network | None = None,
    names: Sequence[str] = (),
    is_root: bool = False,
    only: bool = False,
) -> list[Flag]:
    """How this mpirun starts so many ranks on each of these machines, in this order.

    Args:
        flavour: whose it is.
        hosts: machines and their numbers of ranks.
        network: between them.
        names: variables of mpirun's own environment that the ranks are to have. Their values stay off the command line.
        is_root: whether root starts it.
        only: the ranks on other machines are to have no more than these: MPICH gives them all.

    """
    network = network or Network()
    if flavour.kind == "openmpi":
        return _openmpi(flavour, hosts, network, names, is_root=is_root)
    return _hydra(flavour, hosts, network, names, only=only)


def argv(flavour: Flavour, given: Sequence[Flag], command: Sequence[str]) -> list[str]:
    """The whole command line."""
    return [flavour.program, *(word for flag in given for word in flag.words), *command]


def argv_in_order(
    flavour: Flavour, given: Sequence[Flag], hosts: Sequence[tuple[str, int]], command: Sequence[str]
) -> list[str]:
    """The command line for Open MPI where the machine that it is typed on is one of the others.

    Open MPI would give that machine the first ranks. Open MPI 4's ways to say another order (seq, a rankfile) tell the
    ranks a wrong number of machines, but the parts of a command with ``:`` it leaves in their order; at such parts
    Open MPI 5.0.7 crashes, and its seq is right.
    """
    words = [flavour.program, *(word for flag in given if flag.words[0] not in {"--host", "-x"} for word in flag.words)]
    variables = [word for flag in given if flag.words[0] == "-x" for word in flag.words]  # of one part each
    if flavour.version >= (5,):
        each = ",".join(name for name, count in hosts for _ in range(count))
        return [*words, "--map-by", "seq", "--host", each, *variables, *command]
    for number, (name, count) in enumerate(hosts):
        words += [*((":",) if number else ()), "-np", str(count), "--host", f"{name}:{count}", *variables, *command]
    return words


def _openmpi(
    flavour: Flavour, hosts: Sequence[tuple[str, int]], network: Network, names: Sequence[str], *, is_root: bool
) -> list[Flag]:
    is_new = flavour.version >= (5,)
    each = ",".join(f"{name}:{count}" for name, count in hosts)
    found = [
        Flag(("--host", each), "the machines, and ranks on each; the one where mpirun is typed comes first"),
        Flag(("--bind-to", "none"), "else every rank, with all its threads, is kept on one core"),
    ]
    if network.subnet:
        own = ("--prtemca", "prte_if_include") if is_new else ("--mca", "oob_tcp_if_include")
        found += [
            Flag(("--mca", "btl_tcp_if_include", network.subnet), "the network for MPI's messages: not docker0"),
            Flag((*own, network.subnet), "the network for mpirun's own messages"),
        ]
    if network.ssh_config:
        prefix = ("--prtemca", "plm_ssh") if is_new else ("--mca", "plm_rsh")
        agent = shlex.join(["ssh", "-F", str(network.ssh_config)])
        found += [
            Flag((prefix[0], f"{prefix[1]}_agent", agent), "how the other machines are reached"),
            Flag(
                (prefix[0], f"{prefix[1]}_no_tree_spawn", "1"), "all from here: the others need no keys for each other"
            ),
        ]
    if is_root:
        found.append(Flag(("--allow-run-as-root",), "mpirun refuses root otherwise"))
    words = tuple(word for name in names for word in ("-x", name))
    if words:
        found.append(Flag(words, "variables that the ranks are to have; their values stay off the command line"))
    return found


def _hydra(
    flavour: Flavour, hosts: Sequence[tuple[str, int]], network: Network, names: Sequence[str], *, only: bool
) -> list[Flag]:
    is_intel = flavour.kind == "intelmpi"
    found = [
        Flag(("-hosts", ",".join(f"{name}:{count}" for name, count in hosts)), "the machines, and ranks on each"),
        Flag(("-n", str(sum(count for _, count in hosts))), "ranks on all of them"),
    ]
    if is_intel:
        pin = ("-genv", "I_MPI_PIN", "off")
        found.append(Flag(pin, "else every rank, with all its threads, is kept on its share of the cores"))
    else:
        found.append(Flag(("-bind-to", "none"), "a rank's threads may use all cores"))
    if network.interface:
        found.append(Flag(("-iface", network.interface), "the network between the machines: not docker0"))
    launcher = "-bootstrap" if is_intel else "-launcher"
    if network.ssh_config and network.ssh_program:
        words = (launcher, "ssh", f"{launcher}-exec", str(network.ssh_program))
        found.append(Flag(words, "how the other machines are reached"))
    elif network.is_slurm:
        found.append(Flag((launcher, "ssh"), "not by srun, which may refuse what this mpiexec asks of it"))
    if names:
        why = "the ranks have all variables of here; their values stay off the command line"
        # Of a list Hydra 4.0 forgets, on other machines, what happens to be the last variable of its environment.
        listed = ("-genvlist", ",".join(names))
        found.append(Flag(listed, "variables that the ranks are to have") if only else Flag(("-genvall",), why))
    return found
