"""The root file system of the machines: made once for each release and recipe, and kept."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from instep.errors import RunError
from instep.sandbox.locks import hold, is_free

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE = Path("/var/cache/instep/images")
RELEASES = ("bookworm", "trixie")  # the previous stable, and the current one
RECIPE = Path(__file__).with_name("image.sh")
VM_RECIPE = Path(__file__).with_name("vm.sh")
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "openssh-server", "openssh-client", "rsync", "iproute2", "nftables"),
    *("iputils-ping", "procps", "python3", "ca-certificates", "libgomp1", "libnuma1", "openmpi-bin", "mpich"),
    *("slurm-wlm", "slurm-wlm-basic-plugins", "slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev"),
)
FETCHED = ("chrony", "nfs-kernel-server", "nfs-common")
LIMIT_S = 900
BOOKWORM_LIBC = (2, 36)
# The end of this process ends unshare, which ends all that runs in the namespace.
_ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_SETTINGS = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Check-Date")


def identity(release: str) -> str:
    """The name of an image: the release, and a number that changes with what goes into it."""
    recipe = "\n".join([RECIPE.read_text(), *PACKAGES, *FETCHED])
    return f"{release}-{_digest(recipe)[:12]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def root_of(name: str) -> Path:
    """The root file system of an image."""
    return CACHE / name / "root"


def own_release(os_release: str | None = None) -> str:
    """The release of Debian on this host, or nothing where it is another system.

    Args:
        os_release: the text of ``/etc/os-release``, by default this host's.

    """
    text = Path("/etc/os-release").read_text() if os_release is None else os_release
    values = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in text.splitlines())}
    return values.get("VERSION_CODENAME", "") if values.get("ID") == "debian" else ""


def default_release(own: str | None = None, libc: tuple[str, str] | None = None) -> str:
    """The release to take when nobody says which: this host's own, else the oldest that can run its Python.

    Args:
        own: this host's release, if it is Debian.
        libc: this host's C library, such as ``("glibc", "2.36")``.

    """
    own = own_release() if own is None else own
    if own in RELEASES:
        return own
    digits = (libc or platform.libc_ver())[1].split(".")
    newer = all(part.isdigit() for part in digits) and tuple(map(int, digits)) > BOOKWORM_LIBC
    return RELEASES[1] if newer else RELEASES[0]


def sources(release: str, targets: str) -> tuple[str, list[str]]:
    """Where a release comes from, by what this host's apt knows.

    Args:
        release: which.
        targets: what ``apt-get indextargets`` says, a line ``SITE|RELEASE|COMPONENT`` for each index.

    Returns:
        the mirror, and the lines of a ``sources.list``.

    Raises:
        RunError: apt on this host knows no Debian.

    """
    sites: dict[str, str] = {}
    for line in targets.splitlines():
        site, _, rest = line.partition("|")
        suite, _, component = rest.partition("|")
        if component == "main" and suite.split("-")[0] in {*RELEASES, "stable", "oldstable", "testing", "sid"}:
            sites.setdefault(suite.partition("-")[2], site)
    if "" not in sites:
        raise RunError(
            f"where to get Debian {release} from is not known",
            evidence=["apt on this host has no source of Debian: apt-get indextargets"],
            cure="instep sandbox up --mirror URL",
        )
    return sites[""], [f"deb {site} {release}{'-' if part else ''}{part} main" for part, site in sites.items()]


def ensure(release: str, mirror: str, tell: Callable[[str], None]) -> str:
    """The image of a release; it is made if it is not there.

    Args:
        release: of Debian.
        mirror: where to get it from; by default from where this host gets its packages.
        tell: is given a line at each stage.

    Returns:
        the name of the image.

    Raises:
        RunError: it could not be made.

    """
    name = identity(release)
    _made(name, f"the image of Debian {release}", lambda folder: _build(folder, release, mirror, tell), tell)
    return name


def ensure_vm(release: str, tell: Callable[[str], None]) -> str:
    """What virtual machines start from, made of the image; as :func:`ensure`."""
    name = f"{identity(release)}-vm-{_digest(VM_RECIPE.read_text())[:6]}"
    base = root_of(identity(release))

    def build(folder: Path) -> None:
        _run([*_ALONE, "sh", str(VM_RECIPE), str(base), str(folder)], tell)

    _made(name, f"the disk of Debian {release} for virtual machines", build, tell)
    return name


def _made(name: str, what: str, build: Callable[[Path], None], tell: Callable[[str], None]) -> None:
    """See that a folder of the cache is there; it is complete, or it is not there."""
    if (CACHE / name).is_dir():
        return
    folder = CACHE / f".building-{name}"
    with hold(folder, lambda: tell("another process is making the same image: waiting for it")):
        if (CACHE / name).is_dir():  # it was made while we waited
            folder.rmdir()
            return
        started = time.monotonic()
        tell(f"making {what}; the next sandbox takes it as it is")
        try:
            clear(folder)  # what a build that was killed has left
            build(folder)
            folder.rename(CACHE / name)
        except BaseException:
            clear(folder)
            folder.rmdir()
            raise
        tell(f"  made in {time.monotonic() - started:.0f} s: {CACHE / name}")


def clear(folder: Path) -> None:
    """Empty a folder in which something may still be dying."""
    for _ in range(50):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            return
        time.sleep(0.1)
    raise RunError(f"{folder} cannot be emptied", cure=f"see what uses it: fuser -v {folder}")


def sweep() -> None:
    """Remove what builds that were killed have left."""
    for folder in CACHE.glob(".building-*"):
        if is_free(folder):
            with hold(folder, lambda: None):
                clear(folder)
                folder.rmdir()


def _build(folder: Path, release: str, mirror: str, tell: Callable[[str], None]) -> None:
    root = folder / "root"
    if mirror:
        source, lines = mirror, [f"deb {mirror} {release} main"]
    else:
        source, lines = sources(release, _say("apt-get", "indextargets", "--format", "$(SITE)|$(RELEASE)|$(COMPONENT)"))
    Path(f"{root}.sources").write_text("\n".join(lines) + "\n")
    Path(f"{root}.conf").write_text(_settings(_say("apt-config", "dump")))
    script = ["sh", str(RECIPE), str(root), release, source, " ".join(PACKAGES), " ".join(FETCHED)]
    _run([*_ALONE, *script], tell)
    Path(f"{root}.sources").unlink()
    Path(f"{root}.conf").unlink()


def _settings(dump: str) -> str:
    """Those settings of this host's apt that decide how a mirror is reached and whether it is believed."""
    return "".join(f"{line}\n" for line in dump.splitlines() if line.split(" ")[0] in _SETTINGS) + (
        'Acquire::Languages "none";\nAcquire::GzipIndexes "true";\n'
    )


def _say(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def _run(argv: Sequence[str], tell: Callable[[str], None]) -> None:
    """Run the recipe; show its stages, and its last words if it fails."""
    last: deque[str] = deque(maxlen=12)
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@ "):
                tell(f"  {line[2:].strip()}")
            else:
                last.append(line.rstrip())
        code = process.wait()
    finally:
        late.cancel()
        process.kill()
        process.wait()
    if code:
        why = f"it took more than {LIMIT_S} s" if code < 0 else f"exit code {code}"
        raise RunError(
            "the image of the machines cannot be made",
            evidence=[*last, why],
            cure="is the mirror of this host's apt within reach?  apt-get update",
        )
