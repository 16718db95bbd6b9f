"""``instep run`` on machines that the user has named: which way, how many, and the call that starts them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from instep.cli.hosts import check_seconds, host_list
from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from pathlib import Path

    import typer

    from instep.launch.agents.several import Wish
    from instep.launch.planning.plan import Request
    from instep.world.hosts import Host, HostList

WAYS = ("auto", "local", "ssh", "mpirun", "slurm")


# Said in another way there, or meant for this machine.
_NOT_AT_HEAD = {"program", "via", "hosts", "hostfile", "inventory", "python", "env"}


@dataclass(frozen=True)
class Named:
    """The options of ``instep run`` that say where.

    Attributes:
        hosts: --hosts.
        hostfile: --hostfile.
        inventory: --inventory.
        nodes: --nodes as typed.
        node_wait: seconds.
        sync: --sync.
        own_copies: --own-copies.
        python: the interpreter on the machines; "" is this one.
        env: --env.

    """

    hosts: str | None
    hostfile: Path | None
    inventory: Path | None
    nodes: str | None
    node_wait: float
    sync: bool
    own_copies: bool
    python: str
    env: tuple[str, ...]

    def listed(self, nproc: str) -> HostList | None:
        """The machines; None where none are named.

        An inventory says what a machine has, so its slots give way to --nproc; --hosts and a hostfile say what to run.

        Raises:
            RunError: they are named in two ways, or not clearly.

        """
        found = host_list(self.hosts, self.hostfile, self.inventory)
        if found is None or self.inventory is None or nproc == "auto":
            return found
        return replace(found, hosts=tuple(replace(host, slots=None) for host in found.hosts))

    def check_copying(self, via: str) -> None:
        """See that --sync has machines to copy to.

        Raises:
            RunError: Slurm has not chosen them yet, or they are no affair of ssh.

        """
        if self.sync and via == "slurm":
            raise RunError(
                "--sync copies by ssh to machines that are named, and Slurm starts jobs on machines of its choice",
                cure="start from a folder that all machines share;\n"
                "or, if each machine has its own copy of it, and you know that they are alike:  --own-copies",
            )

    def check(self, via: str, listed: HostList | None) -> None:
        """See that what is said of machines is said of some.

        Raises:
            RunError: it is not.

        """
        check_seconds("--node-wait", self.node_wait)
        if listed is not None and via == "local":
            raise RunError(
                "--via local runs on this machine alone, and machines are named",
                cure="leave out one of both; over the network:  --via ssh",
            )
        if listed is None and via in {"ssh", "mpirun"}:
            raise RunError(
                f"--via {via} needs machines",
                cure="name them:  --hosts h1:2,h2:2   or --hostfile FILE   or --inventory FILE",
            )
        if listed is None and via == "local":
            for option, given in (("--sync", self.sync), ("--own-copies", self.own_copies), ("--nodes", self.nodes)):
                if given:
                    raise RunError(
                        f"{option} is for several machines, and none are named",
                        cure="name them:  --hosts h1:2,h2:2",
                    )


def choose_way(via: str, listed: HostList | None, environ: Mapping[str, str]) -> str:
    """What starts the ranks where the user leaves it open.

    Machines that are named are reached by ssh. Inside a Slurm allocation Slurm starts them, but for a run inside a run.

    Raises:
        RunError: there is no such way.

    """
    if via not in WAYS:
        raise RunError(f"--via {via} is not known", cure=f"one of: {', '.join(WAYS)}")
    if via != "auto":
        return via
    if listed is not None:
        return "ssh"
    return "slurm" if environ.get("SLURM_JOB_ID") and not environ.get("INSTEP_RUN") else "local"


def read_nodes(text: str | None) -> tuple[int, int] | None:
    """``--nodes``: N, or MIN:MAX.

    Raises:
        RunError: it is neither.

    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text, re.ASCII)
    if not match or int(match[1]) < 1:
        raise RunError(
            f"--nodes {text} is no number of machines",
            cure="give --nodes N, or the fewest and the most: --nodes 2:4",
        )
    least, most = int(match[1]), int(match[2] or match[1])
    if most < least:
        raise RunError(
            f"--nodes {text}: the fewest are more than the most", cure=f"the other way round:  --nodes {most}:{least}"
        )
    return least, most


def make_wish(named: Named, *, runs: Path, name: str | None, as_json: bool) -> Wish:
    """What the agents are started with."""
    from instep.launch.agents.several import Wish

    return Wish(
        runs=runs,
        name=name,
        command=("instep", *sys.argv[1:]),
        stdout=2 if as_json else 1,
        nodes=read_nodes(named.nodes),
        node_wait=named.node_wait,
        sync=named.sync,
        own_copies=named.own_copies,
        python=named.python,
        env=named.env,
    )


def is_elsewhere(listed: HostList | None) -> bool:
    """Whether the machines have a head, where mpirun, srun and sbatch are started, and it is another machine."""
    if listed is None or not listed.head:
        return False
    from instep.launch.agents import elsewhere

    return elsewhere.is_elsewhere(listed)


def at_head(ctx: typer.Context, named: Named, listed: HostList | None, via: str) -> int:
    """The same command on the head of the inventory, which sees the machines by their names there; its exit code."""
    from instep.launch.agents.elsewhere import run_at

    assert listed is not None
    return run_at(listed, words_at_head(ctx, listed, via), python=named.python, env=named.env)


def words_at_head(ctx: typer.Context, listed: HostList, via: str) -> list[str]:
    """What is typed after ``instep`` there. Pure."""
    words = ["run", "--via", via, "--hosts", ",".join(_as_typed(host) for host in listed.hosts)]
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name) if option.name else None
        if option.name in _NOT_AT_HEAD or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[option.name or ""]
        if isinstance(value, bool):
            words += [option.opts[0]] if value else []
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                words += [option.opts[0], str(one)]
    return [*words, "--", *(ctx.params["program"] or [])]


def _as_typed(host: Host) -> str:
    user, at, name = host.name.rpartition("@")
    name = f"[{name}]" if ":" in name else name
    return f"{user}{at}{name}" + (f":{host.slots}" if host.slots else "")


def start(request: Request, listed: HostList | None, wish: Wish) -> dict[str, Any]:
    """Start the ranks over agents: on these machines, or on this one where none are named."""
    from instep.launch.agents.several import here, run_there

    return run_there(request, listed or here(), wish)


def dry(request: Request, listed: HostList, wish: Wish, *, via: str, mpirun: str) -> tuple[list[str], dict[str, Any]]:
    """Look at the machines, and say what would be done; see :func:`instep.launch.planning.dry.show`."""
    from instep.launch.agents.several import plan_there
    from instep.launch.planning import dry
    from instep.launch.tasks.starters import find_network

    found = plan_there(request, listed, wish)
    least = found.nodes[0] if found.nodes[0] != len(found.plan.nodes) else 0
    lines, values = dry.show(
        found.plan,
        wish.runs,
        via=via,
        port=found.port,
        least=least,
        head=listed.head,
        network=find_network(listed),
        env=wish.env,
        python=wish.python or sys.executable,
        mpirun=mpirun,
    )
    return [*found.notes, *lines], {**values, "notes": found.notes}


def take_variables(env: tuple[str, ...], environ: MutableMapping[str, str]) -> None:
    """``--env`` where the ranks inherit what this process has.

    Raises:
        RunError: a name is none, or not set here.

    """
    from instep.launch.agents.ssh import given_variables

    environ.update(given_variables(environ, env))
