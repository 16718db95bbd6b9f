"""One frozen record of who this process is, and of what said so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """Why a field of the World has its value.

    Attributes:
        field: the name of the field of :class:`World`.
        source: what said so: a variable with its value (``SLURM_PROCID=3``), an argument, or a rule.
        note: the reasoning, when the source alone does not explain the value.

    """

    field: str
    source: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.note})" if self.source and self.note else self.source or self.note


@dataclass(frozen=True)
class World:
    """Who this process is among all processes of its job.

    The four fields that may be None are what some environments do not tell (a hand-set RANK without LOCAL_RANK,
    MPI with another number of ranks on each node). They are never guessed: ``instep.init()`` fills them in from
    the machines' own names when the ranks have met.

    Attributes:
        rank: number of this process in the world, 0 to ``world_size - 1``.
        world_size: number of processes in the job.
        local_rank: number of this process on its node: which device to take, nothing else.
        local_world_size: number of processes of the job on this node.
        node_rank: number of this node.
        num_nodes: number of nodes.
        master_addr: where the ranks meet: an address or name of the main rank's machine.
        master_port: the TCP port there; 0 where none is needed (a world of one, a file).
        init_method: where to meet, as torch writes it: ``tcp://HOST:PORT``, ``file:///PATH`` or ``env://``.
        launcher: who started this process: ``instep run``, ``torchrun``, ``openmpi``, ``slurm``, ..., ``alone``.
        job_id: the launcher's name for the job, empty where it has none.
        evidence: what said so, one entry or more for each field.

    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str
    master_port: int
    init_method: str
    launcher: str
    job_id: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.rank == 0

    def why(self, field: str) -> str:
        """What said so: the evidence for one field, as one line."""
        return "; ".join(str(entry) for entry in self.evidence if entry.field == field)

    def with_facts(self, *evidence: Evidence, **values: Any) -> World:
        """The same world with some fields replaced; `evidence` takes the place of what spoke for them."""
        kept = tuple(entry for entry in self.evidence if entry.field not in values)
        return replace(self, **values, evidence=kept + evidence)

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values, for ``instep world --json``."""
        return asdict(self)


FIELDS = tuple(field.name for field in fields(World) if field.name != "evidence")
