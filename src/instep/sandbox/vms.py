"""Machines as virtual machines: a kernel of their own, with cgroups and NFS, and a disk over that of the image."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox import image, network, processes
from instep.sandbox.containers import FROM_HERE
from instep.sandbox.files import WANTED, File
from instep.sandbox.state import MARKER, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.sandbox.state import Machine, Sandbox, User

MEMORY_MB = 1024
# What serves a folder to a virtual machine: bookworm's qemu brings the first, later ones have a package of their own.
SERVERS = (Path("/usr/lib/qemu/virtiofsd"), Path("/usr/libexec/virtiofsd"))
_SOCKET_S = 10.0
_PROBE_S = 8.0


def accelerator(made: Path) -> str:
    """What runs the machines' code: ``kvm`` where this host's processors do, else ``tcg``.

    That ``/dev/kvm`` is there says little on a host that is a virtual machine itself: the kernel has to say a word.

    Args:
        made: the folder with the kernel.

    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    words = ["qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-machine", "q35", "-m", "256", "-no-reboot"]
    words += ["-nodefaults", "-display", "none", "-serial", "stdio"]
    words += ["-kernel", str(made / "vmlinuz"), "-append", "console=ttyS0 panic=-1"]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False)
        return "kvm" if b"Linux version" in done.stdout else "tcg"
    return "tcg"


def folders(sandbox: Sandbox) -> list[tuple[str, str, str]]:
    """What a machine sees of this host: (path here, path there, ``rw`` or ``ro``)."""
    shared = str(sandbox.shared)
    return [(shared, "/shared", "rw"), (shared, shared, "rw"), *((path, path, how) for path, how in sandbox.mounts)]


def files(sandbox: Sandbox, machine: Machine) -> dict[str, File]:
    """What a virtual machine has besides, where a container is given it from outside: network and mounts."""
    mounts = [
        f"folder{number} {_fstab(there)} virtiofs {how},nofail 0 0"
        for number, (_, there, how) in enumerate(folders(sandbox))
    ]
    if sandbox.disk:
        mounts.append(f"tmpfs /scratch tmpfs size={sandbox.disk},mode=1777 0 0")
    made = {
        "/etc/fstab": File("\n".join(mounts) + "\n"),
        "/etc/systemd/network/eth0.network": File(
            f"[Match]\nName={network.NIC}\n[Network]\nAddress={machine.address}/24\n{_limit(sandbox.rate)}"
        ),
        f"{WANTED}/systemd-networkd.service": File(link="/lib/systemd/system/systemd-networkd.service"),
    }
    if sandbox.docker:
        made["/etc/systemd/network/docker0.netdev"] = File("[NetDev]\nName=docker0\nKind=veth\n[Peer]\nName=docker1\n")
        made["/etc/systemd/network/docker0.network"] = File(
            f"[Match]\nName=docker0\n[Network]\nAddress={network.DOCKER_ADDRESS}\n"
        )
        made["/etc/systemd/network/docker1.network"] = File(
            "[Match]\nName=docker1\n[Network]\nLinkLocalAddressing=no\n"
        )
    return made


def _limit(rate: str) -> str:
    """What the machine may send, as its own network manager says it; what it receives, its port limits."""
    if not rate:
        return ""
    bits = rate.removesuffix("bit").upper()
    return f"[TokenBucketFilter]\nParent=root\nRate={bits}\nBurstBytes=256K\nLatencySec=50ms\n"


def _fstab(path: str) -> str:
    return "".join(f"\\{ord(letter):03o}" if letter in " \t\\" else letter for letter in path)


def make_disks(sandbox: Sandbox, machine: Machine) -> None:
    """A disk that holds what differs from the image's, and one with the machine's own files, read at its first start.

    Raises:
        RunError: they cannot be made.

    """
    place = sandbox.place(machine)
    base = image.CACHE / sandbox.vm_image / "disk.ext4"
    for argv in (
        ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(place / "disk.qcow2")],
        ["tar", "--create", "--numeric-owner", f"--file={place / 'own.tar'}", f"--directory={place / 'upper'}", "."],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"no disk can be made for {machine.name}", evidence=[" ".join(argv), done.stderr.strip()])
    (place / "own.tar").chmod(0o600)


def start(sandbox: Sandbox, machine: Machine) -> Process:
    """Switch a machine on.

    Returns:
        the process that carries it, which outlives this one.

    Raises:
        RunError: it could not be started.

    """
    place = sandbox.place(machine)
    sockets = [_serve(place, number, path) for number, (path, _, _) in enumerate(folders(sandbox))]
    network.plug(sandbox, machine)
    inside = network.inside(sandbox)
    process = _daemon([*inside, *_qemu(sandbox, machine, sockets)], place, "qemu.log")
    return Process(process.pid, processes.start_of(process.pid) or 0)


def _serve(place: Path, number: int, path: str) -> Path:
    """Serve a folder to a machine, by a process of its own."""
    socket = place / f"folder{number}"
    socket.unlink(missing_ok=True)
    server = server_path()
    if server is None:
        raise RunError("no folder can be shown to virtual machines", evidence=["virtiofsd is not installed"])
    if server == SERVERS[0]:
        words = ["-o", f"source={path}", "-o", "cache=auto"]
    else:
        words = ["--shared-dir", path, "--cache", "auto"]
    process = _daemon([str(server), f"--socket-path={socket}", *words], place, "folders.log")
    deadline = time.monotonic() + _SOCKET_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            last = (place / "folders.log").read_text(errors="replace").splitlines()[-8:]
            raise RunError(f"{path} cannot be shown to the virtual machines", evidence=last)
        time.sleep(0.005)
    process.returncode = 0
    return socket


def server_path() -> Path | None:
    """What serves folders on this host, if anything."""
    return next((path for path in SERVERS if path.exists()), None)


def _daemon(argv: Sequence[str], place: Path, log: str) -> subprocess.Popen[bytes]:
    with (place / log).open("ab") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={"PATH": os.environ.get("PATH", os.defpath), MARKER: str(place)},
            start_new_session=True,
            cwd="/",
        )


def _qemu(sandbox: Sandbox, machine: Machine, sockets: Sequence[Path]) -> list[str]:
    place, made = sandbox.place(machine), image.CACHE / sandbox.vm_image
    number = int(machine.address.rpartition(".")[2])
    kvm = sandbox.accelerator == "kvm"
    words = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-serial", f"file:{_commas(place)}/console.log"]
    words += ["-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "host" if kvm else "max", "-smp", "1"]
    words += ["-object", f"memory-backend-memfd,id=memory,size={MEMORY_MB}M,share=on"]
    words += ["-machine", "q35,memory-backend=memory", "-m", str(MEMORY_MB), "-device", "virtio-rng-pci"]
    words += ["-kernel", str(made / "vmlinuz"), "-initrd", str(made / "initrd.img")]
    words += ["-append", "root=/dev/vda rw net.ifnames=0 console=ttyS0 systemd.show_status=0"]
    words += ["-drive", f"file={_commas(place)}/disk.qcow2,format=qcow2,if=virtio"]
    words += ["-drive", f"file={_commas(place)}/own.tar,format=raw,if=virtio,readonly=on"]
    words += ["-netdev", f"tap,id=net,ifname={machine.name},script=no,downscript=no"]
    words += ["-device", f"virtio-net-pci,netdev=net,mac=52:54:00:4d:{sandbox.subnet:02x}:{number:02x}"]
    for index, socket in enumerate(sockets):
        words += ["-chardev", f"socket,id=folder{index},path={_commas(socket)}"]
        words += ["-device", f"vhost-user-fs-pci,chardev=folder{index},tag=folder{index}"]
    return words


def _commas(path: Path) -> str:
    return str(path).replace(",", ",,")


def enter(sandbox: Sandbox, machine: Machine, argv: Sequence[str], user: User) -> list[str]:
    """The command line that runs a command on a machine: by ssh, as there is no other way into it."""
    there = shlex.join(["sh", "-c", FROM_HERE, "sh", os.getcwd(), *argv])  # noqa: PTH109
    return ["ssh", "-F", str(sandbox.ssh_config), "-l", user.name, machine.name, there]
