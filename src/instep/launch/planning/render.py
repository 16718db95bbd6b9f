"""The commands that other launchers would be given for the same plan, to be read, learned from and pasted. Pure.

Each command is a piece of bash of its own: pasted into a shell of the machine that it names, it starts that machine's
ranks and leaves nothing set. A flag stands on a line of its own, inside an array, because a comment cannot follow a
backslash.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.launch.preflight.compare import table
from instep.launch.running.telling import near
from instep.launch.slurm import batch
from instep.launch.tasks import mpi
from instep.launch.tasks.mpi import Flag
from instep.launch.tasks.srun import NOT_FOR_SRUN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from instep.launch.planning.plan import Node, Plan

_COMMENT_AT = 46  # the column of the comments
_WIDEST = 60  # a longer line has its comment above
_SITE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_END = "END_OF_FILE"
_WHY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "a rank whose NCCL collective fails ends, instead of hanging",
    "CUDA_VISIBLE_DEVICES": "no GPU: --device cpu",
    "GLOO_SOCKET_IFNAME": "gloo: the interface on the way to the others; else that of the host name",
    "NCCL_SOCKET_IFNAME": "NCCL: the same; = means this very name",
}


@dataclass(frozen=True)
class Setting:
    """A variable of the environment.

    Attributes:
        name: of the variable.
        value: not quoted.
        why: what it is for.

    """

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True)
class Command:
    """What is typed on one machine.

    Attributes:
        host: which.
        about: what it starts there.
        cwd: the working folder.
        settings: what is set before.
        flags: the command line.
        before: a line of bash that comes first, and its reason.
        stdin: what the command reads, "" where nothing.

    """

    host: str
    about: str
    cwd: str
    settings: tuple[Setting, ...]
    flags: tuple[Flag, ...]
    before: tuple[str, str] = ("", "")
    stdin: str = ""

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return [word for flag in self.flags for word in flag.words]

    def lines(self) -> list[str]:
        """As bash reads it."""
        body = _with(f"  cd {quote(self.cwd)} || exit", "the working folder")
        body += _with(f"  {self.before[0]}", self.before[1]) if self.before[0] else []
        for one in self.settings:
            body += _with(f"  export {one.name}={quote(one.value)}", one.why)
        words = [line for one in self.flags for line in _with(f"    {' '.join(map(quote, one.words))}", one.why)]
        start = '  exec "${command[@]}"'
        read = [f"{start} <<'{_END}'", *self.stdin.rstrip("\n").split("\n"), _END] if self.stdin else [start]
        return [f"# on {self.host}: {self.about}", "(", *body, "  command=(", *words, "  )", *read, ")"]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "host": self.host,
            "about": self.about,
            "cwd": self.cwd,
            "environment": {one.name: one.value for one in self.settings if not isinstance(one.value, Raw)},
            "argv": self.argv,
            "flags": [{"words": list(flag.words), "why": flag.why} for flag in self.flags],
            **({"before": self.before[0]} if self.before[0] else {}),
            **({"stdin": self.stdin} if self.stdin else {}),
        }


@dataclass(frozen=True)
class Way:
    """One launcher's commands for a plan.

    Attributes:
        name: of the launcher.
        about: how the commands are used.
        commands: one, or one for each machine.

    """

    name: str
    about: str
    commands: tuple[Command, ...]

    def lines(self) -> list[str]:
        """For reading and pasting."""
        return [f"# ---- {self.name}: {self.about}", *(line for one in self.commands for line in ("", *one.lines()))]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "about": self.about,
            "commands": [command.as_json() for command in self.commands],
        }


@dataclass(frozen=True)
class Setup:
    """What the commands need besides the plan.

    Attributes:
        plan: what is done.
        python: the interpreter, the same path on all machines.
        cwd: the working folder.
        port: where the ranks meet; 0: one machine alone, where nobody has to know it.
        environ: of the launcher: what the user has set for gloo and NCCL counts on all machines.
        runs: the folder of all runs.
        head: where mpirun and sbatch are typed; "" is here.
        network: between the machines, as mpirun has to know it.
        flavours: the mpiruns whose commands are shown.
        is_root: whether root types them.
        env: ``--env``: NAME=VALUE, or NAME for the value that the variable has where the command is typed.
        srun: the flags of srun inside an allocation; None where a batch file is shown.

    """

    plan: Plan
    python: str
    cwd: str
    port: int
    environ: Mapping[str, str]
    runs: str = "runs"
    head: str = ""
    network: mpi.Network = field(default_factory=mpi.Network)
    flavours: tuple[mpi.Flavour, ...] = (mpi.OPENMPI_5, mpi.OPENMPI_4, mpi.MPICH_4)
    is_root: bool = False
    env: tuple[str, ...] = ()
    srun: tuple[Flag, ...] | None = None

    @property
    def typed_at(self) -> str:
        """Where mpirun and sbatch are typed."""
        return self.head or "this machine"


def _with(text: str, comment: str) -> list[str]:
    """A line with its comment behind it, or above where the line is long."""
    if len(text) > _WIDEST:
        return [f"{text[: len(text) - len(text.lstrip())]}# {comment}", text]
    return [f"{text.ljust(_COMMENT_AT)} # {comment}"]


class Raw(str):
    """A word that bash is to read as it stands."""

    __slots__ = ()


def quote(word: str) -> str:
    """The word as bash reads it, also where it is typed at a prompt: a tab there would complete names."""
    if isinstance(word, Raw):
        return word
    if word.isprintable():
        quoted = shlex.quote(word)
        return f"'{word}'" if quoted.startswith("=") else quoted  # zsh would look for a program of that name
    return "$'" + "".join(_escaped(char) for char in word) + "'"


def _escaped(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))


# ---- torchrun and its elder


def torchrun(setup: Setup) -> Way:
    """A command for each machine, with the numbers of the machines fixed."""
    nodes = setup.plan.nodes
    tool = Flag((_beside(setup.python, "torchrun"),), "starts the ranks of this machine")
    if len(nodes) == 1:
        flags = (tool, *_static(setup, nodes[0]), *_ranks(setup, nodes[0]))
        return Way("torchrun", "one command", (_command(setup, nodes[0], flags),))
    commands = [
        _command(setup, node, (tool, *_static(setup, node), _local_address(node), *_ranks(setup, node)))
        for node in nodes
    ]
    return Way("torchrun", "on each machine its own command, in any order: they wait for each other", tuple(commands))


def elastic(setup: Setup, least: int, most: int) -> Way:
    """The other form of torchrun: machines may come and go between `least` and `most`."""
    plan = setup.plan
    meeting = f"{_bracketed(plan.master_addr)}:{setup.port}"
    commands = []
    for node in plan.nodes:
        is_main = node is plan.nodes[0]
        flags = (
            Flag((_beside(setup.python, "torchrun"),), "starts the ranks of this machine"),
            Flag(
                (f"--nnodes={least}:{most}",),
                f"from {least} to {most} machines; it starts a while after the first {least}",
            ),
            Flag(("--rdzv-backend=c10d",), "the agents meet in a store of torch's, and number themselves"),
            Flag((f"--rdzv-endpoint={meeting}",), f"which is on {plan.nodes[0].host}"),
            Flag((f"--rdzv-id={plan.target.stem}-{setup.port}",), "one name for this job"),
            Flag(
                (f"--rdzv-conf=is_host={'true' if is_main else 'false'}",),
                "whether the store is here; else it guesses by names",
            ),
            _local_address(node),
            *_ranks(setup, node),
        )
        commands.append(_command(setup, node, flags))
    about = "on each machine its own command; which machine has rank 0 is torchrun's choice"
    return Way("torchrun, elastic", about, tuple(commands))


def distributed_launch(setup: Setup) -> Way:
    """``python -m torch.distributed.launch``, as older tutorials have it."""
    nodes = setup.plan.nodes
    tool = Flag((setup.python, "-m", "torch.distributed.launch"), "the elder of torchrun, now deprecated")
    env = Flag(("--use-env",), "the rank is told by LOCAL_RANK; without this, by an argument --local-rank=N too")
    commands = [_command(setup, node, (tool, *_static(setup, node), env, *_ranks(setup, node))) for node in nodes]
    about = "on each machine its own command, in any order: they wait for each other"
    return Way("torch.distributed.launch", about if len(nodes) > 1 else "one command", tuple(commands))


def _static(setup: Setup, node: Node) -> tuple[Flag, ...]:
    plan, place = setup.plan, node.place
    main = plan.nodes[0].host
    if place.num_nodes == 1:
        return (Flag(("--standalone",), "one machine: the ranks meet on a port that it finds"),)
    return (
        Flag((f"--nnodes={place.num_nodes}",), "machines"),
        Flag((f"--node-rank={place.node_rank}",), f"the number of this one; 0 is {main}, which has rank 0"),
        Flag(
            (f"--master-addr={plan.master_addr}",), f"where the ranks meet: an address of {main} that all have reached"
        ),
        Flag((f"--master-port={setup.port}",), f"was free on {main} a moment ago"),
    )


def _local_address(node: Node) -> Flag:
    return Flag((f"--local-addr={node.address}",), "of this machine; else what its host name means, often 127.0.1.1")


def _ranks(setup: Setup, node: Node) -> tuple[Flag, ...]:
    plan = setup.plan
    flags = [Flag((f"--nproc-per-node={node.place.count}",), "ranks on this machine")]
    if plan.max_restarts:
        flags.append(
            Flag((f"--max-restarts={plan.max_restarts}",), "how often all ranks are started again after a failure")
        )
    return (*flags, program(plan))


def program(plan: Plan) -> Flag:
    """The user's program at the end of a command line."""
    return Flag(plan.target.words, "the program, and what it is given")


def _command(setup: Setup, node: Node, flags: tuple[Flag, ...]) -> Command:
    return Command(node.host, ranks_of(node), setup.cwd, settings_of(setup, node), flags)


def ranks_of(node: Node) -> str:
    """Which ranks a machine has, for reading."""
    first, last = node.place.ranks[0], node.place.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def settings_of(setup: Setup, node: Node) -> tuple[Setting, ...]:
    """The variables of a machine's ranks, and what the user has set for the network."""
    why = {**_WHY, "OMP_NUM_THREADS": f"CPU threads of each rank: {node.threads_why}"}
    mine = [Setting(name, value, why.get(name, "for this job")) for name, value in node.variables.items()]
    asked = [_asked(text) for text in setup.env]
    given = [
        Setting(name, setup.environ[name], "as it is set here")
        for name in _SITE
        if name in setup.environ and name not in {one.name for one in (*mine, *asked)}
    ]
    return (*mine, *given, *asked)


def _asked(text: str) -> Setting:
    """A variable of ``--env``. What is given by its name alone may be a secret: its value is not shown."""
    name, equals, value = text.partition("=")
    if equals:
        return Setting(name, value, "--env")
    return Setting(name, Raw(f'"${{{name}:?}}"'), "--env: set it first where you type this")


def _beside(python: str, tool: str) -> str:
    """A command of the same environment."""
    folder, slash, _ = python.rpartition("/")
    return f"{folder}{slash}{tool}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# ---- mpirun

# What torchrun tells a rank: what the ranks of Open MPI and of MPICH's mpiexec know it by.
_OPENMPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}
_SSH = Path("ssh-program")  # stands for a file that the command makes first


def _known(word: str) -> str:
    return Raw('"$ssh"') if word == str(_SSH) else word


def mpirun(setup: Setup, flavour: mpi.Flavour) -> Way:
    """One command for all machines."""
    nodes = setup.plan.nodes
    hosts = [(node.host, node.place.count) for node in nodes]
    many = len(nodes) > 1
    network = setup.network if many else mpi.Network()
    if setup.head:  # the ssh configuration of here may mean nothing there
        network = replace(network, ssh_config=None)
    before = ("", "")
    if network.ssh_config and flavour.kind != "openmpi":
        network = replace(network, ssh_program=_SSH)
        config = quote(str(network.ssh_config))
        make = f'ssh=$(mktemp) && printf \'#!/bin/sh\\nexec ssh -F %q "$@"\\n\' {config} > "$ssh" && chmod +x "$ssh"'
        before = (make, "a program that knows how the machines are reached")
    if not many:
        hosts = [("localhost", hosts[0][1])]
    settings, differing = _for_all(setup)
    known = _OPENMPI if flavour.kind == "openmpi" else _HYDRA
    names = [one.name for one in settings]
    try:
        if many:
            mpi.check_names([name for name, _ in hosts])
        given = mpi.flags(flavour, hosts, network=network, names=names, is_root=setup.is_root)
    except RunError as error:
        return Way(flavour.title, f"cannot be shown: {error.what}", ())
    flags = (
        Flag((flavour.program,), f"{flavour.title}: starts the ranks of all machines"),
        *(Flag(tuple(map(_known, flag.words)), flag.why) for flag in given),
        Flag(("bash", "-c", _shim(known, differing), "rank"), "what torchrun tells a rank, from what MPI tells it"),
        Flag((setup.python, *setup.plan.target.words), "the program, and what it is given"),
    )
    command = Command(setup.typed_at, "all ranks", setup.cwd, settings, flags, before)
    return Way(flavour.title, "one command", (command,))


def _for_all(setup: Setup) -> tuple[tuple[Setting, ...], dict[str, dict[str, str]]]:
    """The variables that are the same on all machines, and those that are not: machine's name -> name -> value."""
    nodes = setup.plan.nodes
    each = {node.name: {one.name: one for one in settings_of(setup, node)} for node in nodes}
    first, *others = each.values()
    alike = [one for name, one in first.items() if all(name in it and it[name].value == one.value for it in others)]
    names = {one.name for one in alike}
    main = nodes[0].host
    meeting = (
        Setting("MASTER_ADDR", setup.plan.master_addr, f"where the ranks meet: an address of {main}"),
        Setting("MASTER_PORT", str(setup.port or setup.plan.ports[0]), f"a port that is free on {main}"),
    )
    differing = {
        host: own
        for host, settings in each.items()
        if (own := {name: one.value for name, one in settings.items() if name not in names})
    }
    return (*alike, *meeting), differing


def _shim(known: Mapping[str, str], differing: Mapping[str, Mapping[str, str]]) -> str:
    """A line of shell that gives each rank the variables of torchrun, and those that its machine alone has."""
    line = f"export {' '.join(f'{name}=${value}' for name, value in known.items())}; "
    if differing:
        cases = [
            f"{quote(host)}) export {' '.join(f'{name}={quote(value)}' for name, value in own.items())};;"
            for host, own in differing.items()
        ]
        line += f'case "$(hostname)" in {" ".join(cases)} esac; '
    return line + 'exec "$@"'


# ---- Slurm

_SRUN = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def srun(setup: Setup, given: Sequence[Flag]) -> Way:
    """One command for all machines of the allocation that it is typed in.

    Args:
        setup: the plan and what goes with it.
        given: the flags of srun.

    """
    counts = {node.name: {"LOCAL_WORLD_SIZE": str(node.place.count)} for node in setup.plan.nodes}
    settings, differing = _for_all(setup)
    each = {host: {**counts[host], **differing.get(host, {})} for host in counts}
    unset = f"unset {' '.join(NOT_FOR_SRUN)}"
    flags = (
        Flag(("srun",), "starts the ranks of all machines"),
        *given,
        Flag(("bash", "-c", _shim(_SRUN, each), "rank"), "what torchrun tells a rank, from what Slurm tells it"),
        Flag((setup.python, *setup.plan.target.words), "the program, and what it is given"),
    )
    before = (unset, "what the allocation says by itself would contradict the flags below")
    command = Command("a machine of the allocation", "all ranks", setup.cwd, settings, flags, before)
    return Way("srun", "one command, inside the allocation", (command,))


def sbatch(setup: Setup) -> Way:
    """A batch file, given to sbatch as its input."""
    file = batch.render(batch.of_plan(setup.plan, python=setup.python, cwd=setup.cwd, runs=setup.runs))
    flags = (Flag(("sbatch",), "hands the file below to Slurm, which starts it when machines are free"),)
    command = Command(setup.typed_at, "all ranks", setup.cwd, (), flags, stdin=file)
    return Way("sbatch", "one command, on a machine of a Slurm cluster", (command,))


# ---- all of them


def ways(setup: Setup, *, via: str = "local", least: int = 0) -> list[Way]:
    """All launchers' commands, the one that `via` uses first.

    Args:
        setup: the plan and what goes with it.
        via: what starts the ranks: local, ssh, mpirun or slurm.
        least: the fewest machines, where they may be fewer than the plan's; else 0.

    """
    many = len(setup.plan.nodes)
    by_hand = [torchrun(setup), distributed_launch(setup)]
    if least and many > 1:
        by_hand.insert(0, elastic(setup, least, many))
    by_mpi = [mpirun(setup, flavour) for flavour in setup.flavours]
    by_slurm = [sbatch(setup)] if setup.srun is None else [srun(setup, setup.srun)]
    if via == "mpirun":
        return [*by_mpi, *by_hand, *by_slurm]
    return [*by_slurm, *by_hand, *by_mpi] if via == "slurm" else [*by_hand, *by_mpi, *by_slurm]


def text(found: Sequence[Way]) -> list[str]:
    """The commands for reading and pasting."""
    return [line for way in found for line in ("", *way.lines())]


def as_json(found: Iterable[Way]) -> list[dict[str, Any]]:
    """The commands as plain values."""
    return [way.as_json() for way in found]


# ---- the plan itself


def plan_lines(plan: Plan, runs: Path, *, port: int = 0) -> list[str]:
    """A plan for reading: ``--dry-run``.

    Args:
        plan: what would be done.
        runs: the folder of all runs.
        port: where the ranks would meet, 0 where none has been chosen.

    """
    first, last = plan.ports
    one = len(plan.nodes) == 1
    where = f"{plan.world_size} on {plan.host if one else f'{len(plan.nodes)} machines'}"
    kept = "kept for this run from before its first rank starts"
    free = f"{port} where it is still free, else another" if port else f"a free one from {first} to {last}"
    lines = [
        f"run         {' '.join(plan.target.words)}",
        f"ranks       {where}" + (f" ({plan.why})" if plan.why else ""),
        *([] if one else _machines(plan)),
        f"device      {plan.device}",
        *([f"threads     {plan.threads} each: {plan.nodes[0].threads_why}"] if one else []),
        *([] if one else [f"meeting     {plan.master_addr}, an address of {plan.nodes[0].host} that all have reached"]),
        f"port        {free}, {kept}",
        f"run folder  in {near(runs)}",
        f"signals     passed on to the ranks, which have {plan.grace:g} s to leave",
        *([f"restarts    at most {plan.max_restarts} after a failure"] if plan.max_restarts else []),
        "",
    ]
    return [*lines, *(_every_variable(plan) if one else _variables(plan))]


def _machines(plan: Plan) -> list[str]:
    rows = []
    for node in plan.nodes:
        threads = f"{node.threads} thread{'s' if node.threads > 1 else ''} each: {node.threads_why}"
        rows.append([node.host, ranks_of(node), f"{node.address} on {node.interface}", threads])
    return [f"{'' if number else 'machines':12}{line}" for number, line in enumerate(table(rows))]


def _every_variable(plan: Plan) -> list[str]:
    lines = []
    for rank in range(plan.world_size):
        lines += [f"rank {rank}", *(f"  {name}={value}" for name, value in plan.environment(rank).items())]
    return [*lines, "", "torchrun would do the same by:", f"  {plan.torchrun()}"]


def _variables(plan: Plan) -> list[str]:
    """Those that all ranks have alike, then each rank's own."""
    all_of_them = [plan.environment(rank) for rank in range(plan.world_size)]
    alike = {
        name: value for name, value in all_of_them[0].items() if all(one.get(name) == value for one in all_of_them)
    }
    lines = ["variables of all ranks", *(f"  {name}={value}" for name, value in alike.items())]
    for rank, one in enumerate(all_of_them):
        own = [f"{name}={value}" for name, value in one.items() if name not in alike]
        lines += [f"rank {rank} on {plan.node_of(rank).host}", f"  {' '.join(own)}"]
    return lines
