"""``--sync``: the working folder goes to machines that do not share it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from instep.errors import RunError
from instep.launch.preflight import sync
from tests.needs import need_namespaces, need_tool
from tests.real.hosts import hosts
from tests.real.sshd import sshd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.commands import Result
    from tests.real.hosts import Host

SSH = ["ssh", "-o", "BatchMode=yes"]


@pytest.mark.parametrize(
    ("host", "folder", "runs", "last", "has"),
    [
        ("n2", "/code", "/code/runs", "n2:/code/", "--exclude=/runs/"),
        ("anna@n2", "/code", "/code/out/r", "anna@n2:/code/", "--exclude=/out/r/"),
        ("fd00::2", "/code", "/elsewhere", "[fd00::2]:/code/", "--exclude=.venv*"),
        ("anna@fd00::2", "/code", "/code/r[1]*", "anna@[fd00::2]:/code/", r"--exclude=/r\[1]\*/"),
        ("n2", "/a b/c'd", "/r", "n2:/a b/c'd/", """--rsync-path=mkdir -p '/a b/c'"'"'d' && rsync"""),
    ],
)
def test_the_command(host: str, folder: str, runs: str, last: str, has: str) -> None:
    words = sync.command(Path(folder), host, ssh=SSH, runs=Path(runs))
    assert words[-1] == last
    assert has in words
    assert "--rsh=ssh -o BatchMode=yes" in words
    assert not any(word.startswith("--delete") for word in words)
    assert ("--dry-run" in sync.command(Path(folder), host, ssh=SSH, runs=Path(runs), dry_run=True)) is True


@pytest.mark.parametrize("folder", ["/", "/home", str(Path.home()), "/tmp/a\nb"])
def test_folders_that_are_not_copied(folder: str) -> None:
    need_tool("rsync")
    if folder == "/home" and not str(Path.home()).startswith("/home"):
        folder = str(Path.home().parent)
    with pytest.raises(RunError, match="--sync"):
        sync.copy(Path(folder), ["n2"], ssh=["false"], runs=Path("/runs"))


def test_no_rsync_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="not installed here") as caught:
        sync.copy(tmp_path, ["n2"], ssh=["ssh"], runs=tmp_path / "runs")
    assert "apt-get install rsync" in caught.value.cure


def test_a_copy_that_is_interrupted(tmp_path: Path) -> None:
    """What the caller raises ends rsync and its ssh on the spot."""
    need_tool("rsync")
    silent = tmp_path / "ssh"
    silent.write_text("#!/bin/sh\ncat >/dev/null\n")  # as ssh to a machine that hangs: ends with its input
    silent.chmod(0o755)

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if said:
            raise KeyboardInterrupt

    before = psutil.Process().children(recursive=True)  # machines of other tests
    begin = time.monotonic()
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sync.copy(tmp_path, ["n2", "n3"], ssh=[str(silent)], runs=tmp_path / "runs", pause=pause, say=said.append)
    assert time.monotonic() - begin < 5
    assert said == [f"--sync: copying {tmp_path} to n2, n3 ..."]
    assert not set(psutil.Process().children(recursive=True)) - set(before)


def test_lines() -> None:
    many = [f"f{number}" for number in range(14)]
    assert sync.lines({"n2": ["a.py", "b.py"], "n3": [], "n4": many}) == [
        "--sync: copied to n2: a.py, b.py",
        "--sync: nothing to copy to n3",
        f"--sync: copied to n4: {', '.join(many[:12])} and 2 more",
    ]
    assert sync.lines({"n2": ["a.py"]}, dry_run=True) == ["--sync: 1 file would be copied to n2", "  a.py"]


COPY = """
import json, sys
from pathlib import Path
from instep.errors import RunError
from instep.launch.preflight import sync
folder, config, hosts, dry_run = json.loads(sys.argv[1])
ssh = ["ssh", "-F", config, "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
try:
    copied = sync.copy(Path(folder), hosts, ssh=ssh, runs=Path(folder, "runs"), dry_run=dry_run)
    print("\\n".join(sync.lines(copied, dry_run=dry_run)))
except RunError as error:
    print(error)
"""
FILES = ("train.py", "pack/model.py", "a b's.py", "data/big.bin", "runs/old/run.json", ".venv-x/lib.py", ".git/HEAD")


def copy(machine: Host, folder: Path, config: Path, names: Sequence[str], *, dry_run: bool = False) -> Result:
    asked = json.dumps([str(folder), str(config), names, dry_run])
    return machine.run([sys.executable, "-c", COPY, asked], limit_s=30).ok()


@pytest.mark.real
def test_over_ssh(tmp_path: Path) -> None:
    """To two machines that have no such folder: what git ignores, environments and runs stay here."""
    need_namespaces()
    need_tool("rsync", "sshd", "ssh")
    above, keys = tmp_path / "above", tmp_path / "keys"
    folder = above / "it's [x] work"
    keys.mkdir()
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "train.py").chmod(0o755)
    with hosts(["n1", "n2", "n3"]) as machines, sshd(machines, keys) as config:
        n1, n2, n3 = machines
        for machine in (n2, n3):
            machine.run(["mount", "-t", "tmpfs", "tmpfs", above], limit_s=10).ok()
        listed = copy(n1, folder, config, ["n2", "n3"], dry_run=True).out
        assert "--sync: 4 files would be copied to n2" in listed
        assert n2.run(["find", above, "-type", "f"], limit_s=10).ok().out == ""
        assert "train.py" in copy(n1, folder, config, ["n2", "n3"]).out
        for machine in (n2, n3):
            found = machine.run(["find", ".", "-type", "f", "-printf", "%P %m\n"], cwd=folder, limit_s=10).ok().out
            assert sorted(found.splitlines()) == [
                ".gitignore 644", "a b's.py 644", "pack/model.py 644", "train.py 755",
            ]  # fmt: skip
        (folder / "pack/model.py").write_text("changed")
        (folder / "train.py").unlink()
        assert copy(n1, folder, config, ["n2"]).out == "--sync: copied to n2: pack/model.py\n"
        assert n2.run(["cat", "train.py"], cwd=folder, limit_s=10).ok().out == "train.py"  # nothing is removed there
        refused = copy(n1, folder, config, ["n2", "n9"]).out
        assert "could not be copied to n9" in refused
        assert "Could not resolve hostname n9" in refused
        tools = Path(shutil.which("rsync") or "").parent
        layers = f"lowerdir={tools},upperdir={above}/up,workdir={above}/at"
        without = f"mkdir up at && mount -t overlay -o {layers} overlay {tools} && rm {tools}/rsync"
        n3.run(["sh", "-c", without], cwd=above, limit_s=10).ok()
        missing = copy(n1, folder, config, ["n3"]).out
        assert "could not be copied to n3" in missing
        assert "→ rsync is missing on n3; there:  sudo apt-get install rsync" in missing
