"""Which machines: ``--hosts``, a hostfile of Open MPI, MPICH or DeepSpeed, or an inventory become one HostList."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Host:
    """One machine as the user named it.

    Attributes:
        name: what ssh is given: a name, alias or address, ``user@host`` allowed; IPv6 without brackets.
        slots: ranks there; None: --nproc, or one per GPU, or one.
        source: where it was said: ``--hosts``, ``hosts.txt:3``.
        address: from an inventory: where it is reached; "" is by its name.

    """

    name: str
    slots: int | None = None
    source: str = ""
    address: str = ""


@dataclass(frozen=True)
class HostList:
    """The machines in the user's order: rank 0 runs on the first.

    Attributes:
        hosts: at least one, none twice.
        ssh_config: from an inventory: handed to ``ssh -F``.
        head: from an inventory: the machine where mpirun, srun and sbatch are started; "" is this one.

    """

    hosts: tuple[Host, ...]
    ssh_config: Path | None = None
    head: str = ""


def parse_hosts(text: str) -> HostList:
    """The machines of ``--hosts``.

    Raises:
        RunError: the text names no machines, or not clearly.

    """
    raise NotImplementedError


def read_hostfile(path: Path) -> HostList:
    """The machines of a hostfile.

    Raises:
        RunError: the file cannot be read, or names no machines, or not clearly.

    """
    raise NotImplementedError


def read_inventory(path: Path) -> HostList:
    """The machines of an inventory (TOML).

    Raises:
        RunError: the file cannot be read, or names no machines, or not clearly.

    """
    raise NotImplementedError
