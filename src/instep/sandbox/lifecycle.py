"""Make a sandbox, and take it away again, whatever state it is in."""

from __future__ import annotations

import grp
import os
import pwd
import secrets as random
import shutil
import subprocess
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox import containers, files, image, machines, network, processes, state, vms
from instep.sandbox.locks import hold
from instep.sandbox.state import Machine, Sandbox, User, option

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 50
READY_S = 240.0  # what a virtual machine may need whose work is emulated, on a host that is busy
PATIENCE_S = 15.0  # between two words about who is awaited


@dataclass(frozen=True)
class Wish:
    """What ``instep sandbox up`` was asked for; see its options."""

    name: str
    nodes: int
    kind: str
    release: str
    mirror: str
    rate: str
    disk: str
    slurm: bool
    loopback_names: bool
    docker: bool
    mounts: list[tuple[str, str]]
    python: str
    command: str


def plan(wish: Wish) -> Sandbox:
    """The sandbox that would be made.

    Raises:
        RunError: no network is free for it.

    """
    taken = [other.subnet for other in map(state.load, state.names()) if other and other.name != wish.name]
    subnet = network.free_subnet(taken)
    members = [
        Machine(f"n{number}", f"10.77.{subnet}.{number}", random.token_hex(16)) for number in range(1, wish.nodes + 1)
    ]
    return Sandbox(
        name=wish.name,
        kind=wish.kind,
        release=wish.release,
        image=image.identity(wish.release),
        subnet=subnet,
        machines=members,
        user=_caller(),
        command=wish.command,
        boot=state.boot_id(),
        mounts=wish.mounts,
        python=wish.python,
        rate=wish.rate,
        disk=wish.disk,
        slurm=wish.slurm,
        loopback_names=wish.loopback_names,
        docker=wish.docker,
    )


def _caller() -> User:
    """Who typed the command: the one who called sudo, or root."""
    number = os.environ.get("SUDO_UID", "")
    try:
        entry = pwd.getpwuid(int(number) if number.isdigit() else os.getuid())
    except KeyError:
        entry = pwd.getpwuid(0)
    try:
        group = grp.getgrgid(entry.pw_gid).gr_name
    except KeyError:
        group = entry.pw_name
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, group, entry.pw_dir)


def up(wish: Wish, tell: Callable[[str], None]) -> Sandbox:
    """Make a sandbox, and wait until all its machines answer.

    Args:
        wish: what is asked for.
        tell: is given a line at each stage.

    Raises:
        RunError: it is there already, or cannot be made; then nothing of it is left.

    """
    os.umask(0o022)  # anybody may look at what is no secret
    folder = state.BASE / wish.name
    existed = folder.exists()
    with hold(folder, lambda: busy(wish.name)):
        try:
            _refuse_second(wish.name)
            if existed:
                tell(f"removing what is left of an earlier sandbox {wish.name}")
            _clear(wish.name)
            return _make(wish, tell)
        finally:
            _tidy(folder)  # while it is ours: another command may be waiting to begin in it


def busy(name: str) -> None:
    """Say that another command has it.

    Raises:
        RunError: always.

    """
    raise RunError(f"another command is at work on sandbox {name}", cure="wait for its end, and try again")


def _refuse_second(name: str) -> None:
    there = state.load(name)
    if there and there.phase == "up" and there.boot == state.boot_id():
        raise RunError(
            f"there is a sandbox {name} already",
            evidence=[f"made by: {there.command}", f"its inventory: {there.inventory}"],
            cure=f"instep sandbox down{option(there)}\nor take another name:  instep sandbox up --name NAME",
        )


def _make(wish: Wish, tell: Callable[[str], None]) -> Sandbox:
    try:
        image.sweep()
        image.ensure(wish.release, wish.mirror, tell)
        vm_image, accelerator = "", ""
        if wish.kind == "vms":
            vm_image = image.ensure_vm(wish.release, tell)
            accelerator = vms.accelerator(image.CACHE / vm_image)
            if accelerator == "tcg":
                tell("this host's processors do not carry virtual machines: they are emulated, and slow")
        with hold(state.BASE, lambda: None):  # two that start at once take different networks
            sandbox = plan(wish)
            sandbox.vm_image, sandbox.accelerator = vm_image, accelerator
            sandbox.save()
        tell(f"starting {len(sandbox.machines)} machines on 10.77.{sandbox.subnet}.0/24")
        sandbox.switch = network.open_switch(sandbox)
        _write(sandbox)
        for machine in sandbox.machines:
            sandbox.running[machine.name] = machines.start(sandbox, machine)
        sandbox.save()
        await_ready(sandbox, sandbox.machines, tell)
        sandbox.phase = "up"
        sandbox.save()
    except BaseException:
        _clear(wish.name)
        raise
    return sandbox


def _write(sandbox: Sandbox) -> None:
    """Keys, inventory and all files of the machines."""
    folder, user = sandbox.folder, sandbox.user
    folder.chmod(0o755)
    sandbox.shared.mkdir()
    sandbox.shared.chmod(0o1777)
    secrets = _secrets(sandbox)
    for path, text in (
        (sandbox.inventory, files.inventory(sandbox)),
        (sandbox.ssh_config, files.ssh_config(sandbox)),
        (sandbox.known_hosts, files.known_hosts(sandbox.machines, secrets)),
    ):
        path.write_text(text)
        path.chmod(0o644)
    os.chown(sandbox.key, user.uid, user.gid)
    root = image.root_of(sandbox.image)
    tables = {name: Path(f"{root}{name}").read_text() for name in ("/etc/passwd", "/etc/group", "/etc/shadow")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    if sandbox.kind == "vms":
        memory = vms.MEMORY_MB * 4 // 5  # its kernel keeps some for itself
    for machine in sandbox.machines:
        machines.prepare(sandbox, machine, files.machine(sandbox, machine, secrets, tables, memory))


def _secrets(sandbox: Sandbox) -> files.Secrets:
    private, public = _key(sandbox.key, f"instep-sandbox-{sandbox.name}")
    part = sandbox.folder / "host-key"
    hosts = {}
    for machine in sandbox.machines:
        hosts[machine.name] = _key(part, f"root@{machine.name}")
        part.unlink()
    return files.Secrets(private, public, hosts, random.token_hex(64))


def _key(path: Path, comment: str) -> tuple[str, str]:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    half = path.with_name(f"{path.name}.pub")
    public = half.read_text()
    half.unlink()
    return path.read_text(), public


def await_ready(sandbox: Sandbox, which: list[Machine], tell: Callable[[str], None]) -> None:
    """Until one can log in to these machines.

    Args:
        sandbox: the sandbox.
        which: the machines.
        tell: is given a line when it takes long.

    Raises:
        RunError: one has ended, or does not answer.

    """
    started = time.monotonic()
    enough = threading.Event()
    with ThreadPoolExecutor(len(which)) as pool:
        try:
            answers = {pool.submit(_await_login, sandbox, one, started + READY_S, enough): one for one in which}
            waiting = set(answers)
            while waiting:
                done, waiting = wait(waiting, PATIENCE_S, FIRST_COMPLETED)
                for answer in done:
                    answer.result()
                if waiting and not done:
                    names = ", ".join(sorted(answers[one].name for one in waiting))
                    tell(f"  no answer yet from {names} ({time.monotonic() - started:.0f} s)")
        finally:
            enough.set()


def _await_login(sandbox: Sandbox, machine: Machine, deadline: float, enough: threading.Event) -> None:
    said = ""
    while processes.lives(sandbox.running[machine.name]) and time.monotonic() < deadline and not enough.is_set():
        # sshd answers before users may log in: only a login shows it.
        done = subprocess.run(
            ["ssh", "-F", sandbox.ssh_config, machine.name, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, state.MARKER: str(sandbox.folder)},  # if this process is killed, it is found
        )
        if done.returncode == 0:
            return
        said = done.stderr.strip()
        time.sleep(0.05)
    ended = not processes.lives(sandbox.running[machine.name])
    raise RunError(
        f"{machine.name} {'has ended while it started' if ended else 'does not let anybody in'}",
        evidence=[*([said] if said else []), *_last_words(sandbox.place(machine))],
    )


def _last_words(place: Path) -> list[str]:
    """The ends of what a machine and those who carry it have written."""
    lines = []
    for log in sorted(place.glob("*.log")):
        last = log.read_text(errors="replace").splitlines()[-15:]
        lines += [f"the end of {log.name}:", *last] if last else []
    return lines


def down(name: str) -> bool:
    """Take a sandbox away, whatever is left of it.

    Returns:
        there was something.

    """
    folder = state.BASE / state.check_name(name)
    image.sweep()
    found = folder.is_dir() or bool(processes.of(folder))
    with hold(folder, lambda: busy(name)):
        _clear(name)
        _tidy(folder)
    return found


def _clear(name: str) -> None:
    """Remove all of a sandbox but its empty folder. The state goes last: it may be needed again."""
    folder = state.BASE / name
    processes.end(folder)
    containers.remove_cgroups(f"instep.{name}.n[0-9]*")
    network.remove(name)
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name.startswith("state.json"))
    if _mounted_below(folder):
        raise RunError(
            f"something is mounted below {folder}", evidence=_mounted_below(folder), cure="unmount it, and try again"
        )
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _mounted_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f"{line.split()[4]}/".startswith(f"{folder}/")]


def _tidy(folder: Path) -> None:
    """Remove empty folders; the last is one that systemd-nspawn needs while it starts."""
    for one in (folder, state.BASE, state.BASE.parent, Path("/run/systemd/nspawn")):
        with suppress(OSError):
            one.rmdir()
