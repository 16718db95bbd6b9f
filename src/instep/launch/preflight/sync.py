"""``--sync``: copy the working folder to the other machines by rsync, over the ssh that starts the job there."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SILENCE_S = 30  # rsync gives up when nothing moves for so long
_TICK_S = 0.05
_MOMENT_S = 2.0
_MISSING = 127  # what a shell says of a command that is not there
_VANISHED = 24  # a file was removed here in the meantime: an editor's, say
# What rsync does not always say in words, when the other side ends first.
_CODES = {
    11: "a file could not be read or written; is the disk full?",
    12: "the connection broke",
    23: "some files could not be copied",
    30: f"nothing moved for {_SILENCE_S} s",
}
_LONGEST = 12  # names of copied files that are shown


def command(folder: Path, host: str, *, ssh: Sequence[str], runs: Path, dry_run: bool = False) -> list[str]:
    """The rsync that copies what is new or changed in `folder` to the same path on `host`. Pure.

    Nothing is removed there. Left out are the folder of runs, ``.git``, Python environments named ``.venv*``, caches,
    and what ``.gitignore`` files name.

    Args:
        folder: absolute.
        host: as ssh is given it.
        ssh: the ssh command with its options.
        runs: the folder of all runs.
        dry_run: only list what would be copied.

    """
    left_out = [".git", ".venv*", "__pycache__", "/runs/"]
    with suppress(ValueError):
        left_out.append(f"/{_literally(str(runs.absolute().relative_to(folder)))}/")
    where = str(folder)
    name = f"[{host}]" if ":" in host and "@" not in host else host
    user, at, address = host.rpartition("@")
    if at and ":" in address:
        name = f"{user}@[{address}]"
    return [
        "rsync",
        "-rlpt",
        "--protect-args",  # names with blanks and the like reach the other side as they are
        f"--timeout={_SILENCE_S}",
        *(["--dry-run"] if dry_run else []),
        "--out-format=%n",
        f"--rsh={shlex.join(ssh)}",
        f"--rsync-path=mkdir -p {shlex.quote(where)} && rsync",
        *(f"--exclude={pattern}" for pattern in dict.fromkeys(left_out)),
        "--filter=:- .gitignore",
        "--",
        f"{where}/",
        f"{name}:{where}/",
    ]


def _literally(name: str) -> str:
    """As a pattern of rsync that matches this name only."""
    return "".join(f"\\{c}" if c in "*?[\\" else c for c in name) if any(c in "*?[" for c in name) else name


def copy(
    folder: Path,
    hosts: Sequence[str],
    *,
    ssh: Sequence[str],
    runs: Path,
    dry_run: bool = False,
    pause: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda _: None,
) -> Mapping[str, list[str]]:
    """Copy the folder to all hosts at once.

    Args:
        folder: the working folder.
        hosts: the other machines, as ssh is given them.
        ssh: the ssh command with its options, among them ``-o BatchMode=yes``.
        runs: the folder of all runs, which is left out.
        dry_run: only list what would be copied.
        pause: called again and again while rsync runs, with seconds. What it raises ends the copying.
        say: told what is waited for, where it takes longer than a moment.

    Returns:
        The files that were new or changed on each host.

    Raises:
        RunError: the folder is none to copy, or a copy failed; the other hosts may have theirs.

    """
    folder = folder.absolute()
    _check(folder)
    with ExitStack() as at_end:
        running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = {}
        at_end.callback(_kill, running)
        for host in hosts:
            out, err = at_end.enter_context(tempfile.TemporaryFile()), at_end.enter_context(tempfile.TemporaryFile())
            words = command(folder, host, ssh=ssh, runs=runs, dry_run=dry_run)
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone
            )
            running[host] = (process, out, err)
        slow_at = time.monotonic() + _MOMENT_S
        while any(process.poll() is None for process, _, _ in running.values()):
            if time.monotonic() > slow_at:
                slow_at = math.inf
                say(f"--sync: copying {folder} to {', '.join(hosts)} ...")
            pause(_TICK_S)
        ended = {host: (process.wait(), _text(out), _text(err)) for host, (process, out, err) in running.items()}
    failed = {host: (code, said) for host, (code, _, said) in ended.items() if code not in {0, _VANISHED}}
    if failed:
        raise _failure(folder, failed)
    return {
        host: [line for line in listed.splitlines() if not line.endswith("/")] for host, (_, listed, _) in ended.items()
    }


def _kill(running: Mapping[str, tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]) -> None:
    """After a Ctrl-C, or where one could not be started, none goes on."""
    for process, _, _ in running.values():
        if process.poll() is None:
            process.terminate()
            process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _check(folder: Path) -> None:
    if shutil.which("rsync") is None:
        raise RunError(
            "--sync needs rsync, which is not installed here",
            cure="sudo apt-get install rsync\nor use a folder that all machines share, without --sync",
        )
    home = Path.home()
    if folder in {Path("/"), home, *home.parents}:
        raise RunError(
            f"--sync would copy all of {folder} to the other machines",
            cure="keep the program in a folder of its own, and start from there:  mkdir ~/train && cd ~/train",
        )
    if "\n" in str(folder):
        raise RunError("--sync cannot copy a folder with a line break in its name", evidence=[repr(str(folder))])


def _failure(folder: Path, failed: Mapping[str, tuple[int, str]]) -> RunError:
    """One error for all hosts, with rsync's or ssh's own words."""
    first = next(iter(failed))
    evidence = []
    for host, (code, said) in failed.items():
        words = said.splitlines()[:3] or [f"exit code {code} of rsync: {_CODES.get(code, 'see its manual')}"]
        evidence += [f"{host}: {line}" for line in words]
    missing = [host for host, (code, said) in failed.items() if code == _MISSING or "rsync: command not found" in said]
    cure = f"see whether it works by hand:  ssh {first} {shlex.quote(f'ls -ld {folder}; df -h {folder}')}"
    if missing:
        cure = f"rsync is missing on {', '.join(missing)}; there:  sudo apt-get install rsync"
    return RunError(f"--sync: {folder} could not be copied to {', '.join(failed)}", evidence=evidence, cure=cure)


def lines(copied: Mapping[str, Sequence[str]], *, dry_run: bool = False) -> list[str]:
    """What was copied, or would be, for reading."""
    said = []
    for host, names in copied.items():
        verb = "would be copied" if dry_run else "copied"
        if not names:
            said.append(f"--sync: nothing to copy to {host}")
        elif dry_run:
            said += [f"--sync: {len(names)} {'files' if len(names) > 1 else 'file'} {verb} to {host}"]
            said += [f"  {name}" for name in names]
        else:
            more = f" and {len(names) - _LONGEST} more" if len(names) > _LONGEST else ""
            said.append(f"--sync: {verb} to {host}: {', '.join(names[:_LONGEST])}{more}")
    return said
