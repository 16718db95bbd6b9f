"""What one launcher's variables say, before it is compared with what others say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep.errors import WorldError
from instep.world.record import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Reading:
    """What the variables of one launcher say; None where they say nothing.

    Attributes:
        launcher: the name of the launcher.
        final: the launcher started this very process as a rank, so no other reading can overrule it.
        port_key: a text that all ranks of this job share and no other job has, to derive a port from.

    The other attributes are those of :class:`instep.world.World`.

    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job_id: str = ""
    port_key: str = ""
    final: bool = False
    evidence: tuple[Evidence, ...] = field(default=())

    def said(self) -> str:
        """The reading in a line, for an error that shows two of them."""
        sources = ", ".join(entry.source for entry in self.evidence if entry.field in ("rank", "world_size"))
        return f"{self.launcher}: rank {self.rank} of {self.world_size}   ({sources})"


@dataclass(frozen=True)
class Refusal:
    """Variables of a launcher that do not make this process a rank, though a world of one would be a wrong guess."""

    launcher: str
    error: WorldError


class Variables:
    """A view of the environment that remembers what was read for which field."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._evidence: list[Evidence] = []

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What has been read so far."""
        return tuple(self._evidence)

    def text(self, field: str, *names: str) -> str | None:
        """The first of these variables that is set and not empty."""
        for name in names:
            value = self._env.get(name, "")
            if value:
                self.because(field, f"{name}={value}")
                return value
        return None

    def number(self, field: str, *names: str, least: int = 0) -> int | None:
        """The same, as a number.

        Raises:
            WorldError: it is not a whole number, or is less than `least`.

        """
        for name in names:
            value = self._env.get(name, "").strip()
            if not value:
                continue
            if not value.isascii() or not value.lstrip("-").isdigit() or int(value) < least:
                raise WorldError(
                    f"{name} has to be a whole number of at least {least}.",
                    evidence=[f"{name}={self._env[name]!r}"],
                    cure=f"Set {name} right, or unset it if it is a leftover:  unset {name}",
                )
            self.because(field, f"{name}={value}")
            return int(value)
        return None

    def because(self, field: str, source: str, note: str = "") -> None:
        """Remember why a field has its value."""
        self._evidence.append(Evidence(field, source, note))


def check(reading: Reading) -> Reading:
    """The same reading, once its numbers are possible together.

    Raises:
        WorldError: a rank outside its world, more ranks on a node than in the world, and the like.

    """
    for small, large in (
        ("rank", "world_size"),
        ("local_rank", "local_world_size"),
        ("node_rank", "num_nodes"),
    ):
        number, limit = getattr(reading, small), getattr(reading, large)
        if number is not None and limit is not None and number >= limit:
            _impossible(reading, (small, large), f"{small} {number} does not exist in a {large} of {limit}")
    for small, large in (
        ("local_world_size", "world_size"),
        ("num_nodes", "world_size"),
        ("local_rank", "rank"),
    ):
        number, limit = getattr(reading, small), getattr(reading, large)
        if number is not None and number > limit:
            _impossible(reading, (small, large), f"{small} {number} is more than {large} {limit}")
    return reading


def _impossible(reading: Reading, names: Iterable[str], what: str) -> None:
    raise WorldError(
        f"{what}: the variables of {reading.launcher} cannot all be right.",
        evidence=[entry.source for entry in reading.evidence if entry.field in names],
        cure="Unset the leftovers of another job in this shell, or mend the script that exports them.",
    )


def node_of(rank: int, local_rank: int, local_world_size: int, num_nodes: int) -> int | None:
    """The node's number where all nodes hold equally many ranks, numbered node by node or round robin.

    None where the numbers fit neither numbering.
    """
    by_slot, rest = divmod(rank, local_world_size)
    if rest == local_rank:
        return by_slot
    turn, by_node = divmod(rank, num_nodes)
    return by_node if turn == local_rank else None
