"""``instep sandbox``: a practice cluster of real Debian machines on this host."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep.errors import InstepError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instep.sandbox.state import Sandbox

app = typer.Typer(
    name="sandbox",
    help="A practice cluster: real Debian machines with systemd, sshd and Slurm, on this host.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_OWN = {"allow_interspersed_args": False, "ignore_unknown_options": False}  # what follows NODE belongs to the command

Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Which sandbox.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)]
Node = Annotated[str, typer.Argument(metavar="NODE", help="A machine: n1, n2, ...")]


@app.command("up")
def up_command(  # noqa: PLR0917  # typer reads the signature
    name: Annotated[str, typer.Option(metavar="NAME", help="Its name: two can stand side by side.")] = "sandbox",
    nodes: Annotated[int, typer.Option(metavar="N", help="How many machines: n1 to nN.")] = 3,
    kind: Annotated[
        str, typer.Option("--as", metavar="containers|vms", help="Containers start in seconds; VMs have own kernels.")
    ] = "containers",
    rate: Annotated[
        str, typer.Option("--net", metavar="RATE", help="How fast their network is, such as 100mbit.")
    ] = "",
    release: Annotated[
        str, typer.Option(metavar="bookworm|trixie", help="Debian's. [default: this host's, else bookworm]")
    ] = "",
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="A folder that all see, at the same path. [default: this one]"),
    ] = None,
    disk: Annotated[str, typer.Option(metavar="SIZE", help="A small file system on /scratch, such as 500mb.")] = "",
    slurm: Annotated[bool, typer.Option("--slurm/--no-slurm", help="Slurm runs on them.")] = True,
    loopback_names: Annotated[
        bool,
        typer.Option("--loopback-names", help="Each machine's own name is 127.0.1.1 there.", show_default=False),
    ] = False,
    docker: Annotated[
        bool, typer.Option("--docker", help="Each has a docker0 with the same address.", show_default=False)
    ] = False,
    mirror: Annotated[str, typer.Option(metavar="URL", help="Where to get Debian. [default: as this host's apt]")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; make nothing.", show_default=False)
    ] = False,
    as_json: Json = False,
) -> None:
    """Make machines, and wait until they answer.

    They see this folder (or --share), the Python in use, and a folder /shared, each at the same path.
    """
    with _errors(as_json):
        from instep.sandbox import image, lifecycle, needs, network, state, views

        state.check_name(name)
        _check(nodes, kind, release, disk)
        if rate:
            network.check_rate(rate)
        release = release or image.default_release()
        wish = lifecycle.Wish(
            name=name,
            nodes=nodes,
            kind=kind,
            release=release,
            mirror=mirror,
            rate=rate,
            disk=disk.lower().rstrip("b"),  # as the kernel writes it
            slurm=slurm,
            loopback_names=loopback_names,
            docker=docker,
            mounts=_mounts(share or [], release),
            python=views.python_link(release, image.own_release()),
            command=shlex.join(["instep", *sys.argv[1:]]),
        )
        needs.check(vms=kind == "vms")
        if dry_run:
            _show_plan(lifecycle.plan(wish), as_json)
            return
        started = time.monotonic()
        sandbox = lifecycle.up(wish, _tell)
        _tell(f"{len(sandbox.machines)} machines answer after {time.monotonic() - started:.1f} s")
        _print_up(sandbox, as_json)


@app.command("status")
def status_command(
    name: Annotated[str, typer.Option("--name", help="Only this one.")] = "", as_json: Json = False
) -> None:
    """Tell which sandboxes there are, and how their machines are."""
    with _errors(as_json):
        from instep.sandbox import control, state

        found = [control.the(name)] if name else [one for one in map(state.load, state.names()) if one]
        looks = [_look(sandbox) for sandbox in found]
        if as_json:
            print(json.dumps({"sandboxes": looks}, indent=2), flush=True)
        elif not looks:
            print("there is no sandbox; make one:  instep sandbox up", flush=True)
        else:
            print("\n".join(line for sandbox in looks for line in _look_lines(sandbox)), flush=True)


@app.command("ssh", context_settings=_OWN)
def ssh_command(
    node: Node,
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", show_default=False)] = None,
    name: Name = "sandbox",
) -> None:
    """Log in to a machine, or run a command there, by ssh."""
    from instep.sandbox import control, needs

    sandbox = control.the(name)
    machine = sandbox.machine(node)
    if not os.access(sandbox.key, os.R_OK):
        raise RunError(
            f"only {sandbox.user.name} and root may log in to sandbox {name}",
            evidence=[f"the key is theirs: {sandbox.key}"],
            cure=needs.as_root(),
        )
    words = [shlex.join(command)] if command and len(command) > 1 else list(command or [])
    _become(["ssh", "-F", str(sandbox.ssh_config), machine.name, *words])


@app.command("exec", context_settings=_OWN)
def exec_command(
    node: Node,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND")],
    name: Name = "sandbox",
    user: Annotated[str, typer.Option(metavar="USER", help="As whom: root, or who made the sandbox.")] = "root",
) -> None:
    """Run a command on a machine from its console: also where its network is cut."""
    from instep.sandbox import control, machines, needs

    needs.check_root()
    sandbox = control.the(name)
    _become(machines.enter(sandbox, sandbox.machine(node), command, user))


@app.command("cut")
def cut_command(node: Node, name: Name = "sandbox") -> None:
    """Cut a machine off: all its packets are lost, and nobody is told."""
    from instep.sandbox import control, needs

    needs.check_root()
    control.cut(name, node, off=True)
    _tell(f"{node} is cut off; give it back its network:  instep sandbox heal{_option(name)} {node}")


@app.command("heal")
def heal_command(node: Node, name: Name = "sandbox") -> None:
    """Give a machine its network back."""
    from instep.sandbox import control, needs

    needs.check_root()
    control.cut(name, node, off=False)
    _tell(f"{node} has its network again")


@app.command("kill")
def kill_command(node: Node, name: Name = "sandbox") -> None:
    """Take a machine's power away: nothing on it can say a last word."""
    from instep.sandbox import control, needs

    needs.check_root()
    control.kill(name, node)
    _tell(f"{node} is off; switch it on:  instep sandbox start{_option(name)} {node}")


@app.command("start")
def start_command(node: Node, name: Name = "sandbox") -> None:
    """Switch a machine on again, with the disk that it had."""
    from instep.sandbox import control, needs

    needs.check()
    with _signals():
        control.start(name, node, _tell)
    _tell(f"{node} is on")


@app.command("down")
def down_command(
    name: Name = "sandbox",
    everything: Annotated[bool, typer.Option("--all", help="All sandboxes of this host.", show_default=False)] = False,
) -> None:
    """Take a sandbox away, with all that belongs to it; the image is kept for the next one."""
    from instep.sandbox import lifecycle, needs, state

    needs.check_root()
    names = state.names() if everything else [name]
    for one in names:
        if lifecycle.down(one):
            _tell(f"sandbox {one} is gone")
        elif not everything:
            others = ", ".join(state.names())
            raise RunError(
                f"there is no sandbox {one}",
                evidence=[f"there are: {others}"] if others else [],
                cure="instep sandbox status",
            )
    if not names:
        _tell("there is no sandbox")


def _mounts(share: list[str], release: str) -> list[tuple[str, str]]:
    """What all machines see: this folder or those that were asked for, and the Python in use."""
    from instep.sandbox import image, views

    here = os.getcwd()  # noqa: PTH109
    shares = [views.check_share(path) for path in share] or ([here] if views.can_share(here) else [])
    return views.collapse(shares, views.python_folders(release, image.own_release()))


def _check(nodes: int, kind: str, release: str, disk: str) -> None:
    import re

    from instep.sandbox.image import RELEASES
    from instep.sandbox.lifecycle import MOST

    if not 1 <= nodes <= MOST:
        raise RunError(f"--nodes {nodes} cannot be", cure=f"from 1 to {MOST} machines")
    if kind not in {"containers", "vms"}:
        raise RunError(f"--as {kind} is not known", cure="one of: containers, vms")
    if release and release not in RELEASES:
        raise RunError(f"--release {release} is not known", cure=f"one of: {', '.join(RELEASES)}")
    if disk and not re.fullmatch(r"[1-9][0-9]{0,6}[kmg]b?", disk.lower()):
        raise RunError(f"--disk {disk} is not a size", cure="such as 500mb or 2gb")


def _print_up(sandbox: Sandbox, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_described(sandbox), indent=2), flush=True)
        return
    machines = sandbox.machines
    print(f"sandbox {sandbox.name}: {machines[0].name} to {machines[-1].name}, Debian {sandbox.release}")
    print(f"  inventory: {sandbox.inventory}")
    print(f"  log in:    instep sandbox ssh{_option(sandbox.name)} {machines[0].name}")
    print(f"  try:       instep run --inventory {sandbox.inventory} recipes/digits.py", flush=True)


def _described(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "name": sandbox.name,
        "as": sandbox.kind,
        "release": sandbox.release,
        "inventory": str(sandbox.inventory),
        "ssh_config": str(sandbox.ssh_config),
        "shared": str(sandbox.shared),
        "user": sandbox.user.name,
        "network": f"10.77.{sandbox.subnet}.0/24",
        "machines": [{"name": one.name, "address": one.address} for one in sandbox.machines],
        "mounts": [{"path": path, "how": how} for path, how in sandbox.mounts],
        "slurm": sandbox.slurm,
        "net": sandbox.rate or None,
    }


def _show_plan(sandbox: Sandbox, as_json: bool) -> None:
    from instep.sandbox import image

    there = image.root_of(sandbox.image).is_dir()
    if as_json:
        print(json.dumps({**_described(sandbox), "image": sandbox.image, "image_is_there": there}, indent=2))
        return
    print(f"sandbox {sandbox.name}: {len(sandbox.machines)} {sandbox.kind}, Debian {sandbox.release}")
    print(f"  image     {sandbox.image}{'' if there else ', to be made first (about a minute, about 700 MB)'}")
    print(f"  network   10.77.{sandbox.subnet}.0/24, this host is {sandbox.gateway} by {sandbox.link}")
    print(f"  machines  {', '.join(f'{one.name} {one.address}' for one in sandbox.machines)}")
    print(f"  users     {', '.join(dict.fromkeys([sandbox.user.name, 'root']))}")
    for path, how in [("/shared", "rw"), *sandbox.mounts]:
        print(f"  all see   {path} ({how})")


def _look(sandbox: Sandbox) -> dict[str, Any]:
    import dataclasses

    from instep.sandbox import control, locks, state

    phase = sandbox.phase
    if sandbox.boot != state.boot_id():
        phase = "gone with the host's last start"
    elif phase == "starting" and locks.is_free(sandbox.folder):
        phase = "half made, and nobody is at it"
    return {
        **_described(sandbox),
        "phase": phase,
        "machines": [dataclasses.asdict(one) for one in control.look(sandbox)],
        "slurm_answers": control.slurm_answers(sandbox),
    }


def _look_lines(sandbox: dict[str, Any]) -> list[str]:
    slurm = (
        ("Slurm answers" if sandbox["slurm_answers"] else "Slurm does not answer") if sandbox["slurm"] else "no Slurm"
    )
    lines = [f"sandbox {sandbox['name']} is {sandbox['phase']}: Debian {sandbox['release']}, {slurm}"]
    for one in sandbox["machines"]:
        state = "off" if not one["power"] else "cut off" if one["cut"] else "up" if one["ssh"] else "no answer"
        lines.append(f"  {one['name']:<4} {one['address']:<13} {state}")
    return [*lines, f"  inventory: {sandbox['inventory']}"]


def _option(name: str) -> str:
    return "" if name == "sandbox" else f" --name {name}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _become(argv: list[str]) -> None:
    """Go on as another program: its exit code is ours, and signals reach it."""
    try:
        os.execvp(argv[0], argv)  # noqa: S606  # the words are the user's own
    except FileNotFoundError as error:
        raise RunError(f"{argv[0]} is not installed", evidence=[str(error)]) from error


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """With --json, an error is an object on standard output as well."""
    with _signals():
        try:
            yield
        except InstepError as error:
            if as_json:
                said = {"what": error.what, "evidence": list(error.evidence), "cure": error.cure}
                print(json.dumps({"exit_code": error.exit_code, "error": said}, indent=2), flush=True)
            raise


@contextmanager
def _signals() -> Iterator[None]:
    """The first signal to leave begins the way back, and no second one disturbs it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []

    def leave(number: int, _: object) -> None:
        came.append(number)
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        _tell("✗ interrupted; what was made is removed")
        raise typer.Exit(128 + (came[0] if came else signal.SIGINT)) from None
    finally:
        for number, handler in before.items():
            if not came:  # else this process is on its way out, and stays deaf
                signal.signal(number, handler)
