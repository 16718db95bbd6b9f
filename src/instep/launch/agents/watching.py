"""The launcher's guard over agents: their witnesses are the nodes of its watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from instep.guard.nodes import LostError, Remote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instep.launch.running.conduct import Conduct
    from instep.launch.running.guarding import Guarding


class Seen(Protocol):
    """One machine's ranks, with a witness beside them."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody is there any more."""

    def descriptors(self) -> Sequence[int]:
        """Readable when there is something to hear."""

    def ask_guard(self, told: Sequence[Any]) -> None:
        """Tell the witness something."""

    def take_guard(self) -> list[Sequence[Any]]:
        """What the witness has said; all that comes besides waits."""


class _Line:
    """Messages between the watch and a witness, on the agent's own connection."""

    def __init__(self, server: Seen, restart: int) -> None:
        self._server, self._restart = server, restart

    def fileno(self) -> int:
        """For poll."""
        return self._server.descriptors()[0]

    def send(self, message: Mapping[str, Any]) -> None:
        """Send."""
        self._server.ask_guard([self._restart, message])

    def receive(self) -> list[dict[str, Any]]:
        """What has come, without waiting.

        Raises:
            LostError: the agent has gone.

        """
        found = [told for restart, told in self._server.take_guard() if restart == self._restart]
        if not found and self._server.is_lost:
            raise LostError("the agent has gone")
        return found

    def close(self) -> None:
        """The connection is the job's."""


def guard_over(run: Conduct, servers: Sequence[Seen]) -> Guarding | None:
    """The guard of a round; None where there is none.

    Args:
        run: what is being carried out.
        servers: the agents, in the order of the plan's nodes.

    """
    if run.plan.guard == "off" or run.plan.world_size == 1:
        return None
    from instep.launch.running.guarding import Guarding

    nodes = []
    for server, node in zip(servers, run.plan.nodes, strict=True):
        remote = Remote(node.name, node.place.ranks)
        remote.link = _Line(server, run.plan.restart)
        nodes.append(remote)
    try:
        return Guarding(run.plan, run.folder, run.output, run.reporter.teller, nodes)
    except OSError as error:
        teller = run.reporter.teller
        run.say([teller.note(f"the ranks are not watched: no folder for their records ({error})")])
        return None
