"""What a machine says about itself."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from instep.launch.planning.machine import this_machine
from instep.launch.planning.target import Target
from instep.launch.preflight import facts, shared
from instep.launch.preflight.compare import Answer, check
from tests.needs import need_namespaces
from tests.real.hosts import hosts


def gather(folder: Path, target: Target, *, code: bool = False) -> dict[str, object]:
    asked = json.loads(json.dumps(facts.ask(target, folder, Path("runs"), code=code)))
    found: dict[str, object] = json.loads(json.dumps(facts.gather(asked)))
    return found


def test_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    before = time.time()
    found = gather(tmp_path, Target("script", "train.py"))
    assert facts.machine_of(found) == this_machine(os.environ)
    assert found["cwd"] == {"path": str(tmp_path), "there": True, "writable": True}
    assert found["executable"] == sys.executable
    assert before <= float(str(found["clock"])) <= time.time()
    assert check([Answer("here", found)], found, own_copies=True) == []


SCRIPTS = [
    (Target("script", "a.py"), "a.py"),
    (Target("script", "sub/b.py"), "sub/b.py"),
    (Target("folder", "pack"), "pack/__main__.py"),
    (Target("module", "pack.inner"), "pack/inner.py"),
    (Target("module", "pack"), "pack/__main__.py"),
    (Target("script", "c.py"), None),
    (Target("folder", "sub"), None),
    (Target("module", "none.such"), None),
    (Target("module", "no-name"), None),
    (Target("script", "x" * 300), None),
]


@pytest.mark.parametrize(("target", "file"), SCRIPTS, ids=lambda value: getattr(value, "name", "")[:20])
def test_the_program(tmp_path: Path, target: Target, file: str | None) -> None:
    """The file that would run there is found from the working folder, wherever the agent itself stands."""
    for name in ("a.py", "sub/b.py", "pack/__init__.py", "pack/__main__.py", "pack/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit({name!r})\n")
    script = facts.gather(facts.ask(target, tmp_path, Path("runs")))["script"]
    if file is None:
        assert script["hash"] is None
        assert script["why"]
    else:
        assert script["path"] == str(tmp_path / file)
        changed = script["hash"]
        (tmp_path / file).write_text("other\n")
        assert facts.gather(facts.ask(target, tmp_path, Path("runs")))["script"]["hash"] != changed


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    found = gather(tmp_path / "none", Target("script", "train.py"), code=True)
    assert found["cwd"] == {"path": str(tmp_path / "none"), "there": False, "writable": False}
    assert found["code"] == {}
    assert isinstance(found["free_bytes"], int)  # of the folder above


def test_the_code_of_the_folder(tmp_path: Path) -> None:
    """Environments, hidden folders, run folders and caches are no code."""
    names = ("a.py", "sub/b.py", "runs/c.py", "env/lib/d.py", ".git/e.py", "__pycache__/f.py", "sub/data.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "gone.py").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    code = facts.gather(facts.ask(Target("script", "a.py"), tmp_path, Path("runs"), code=True))["code"]
    assert sorted(code) == ["a.py", "gone.py", "pipe.py", "sub/b.py"]
    assert code["gone.py"] is None


def test_another_instep_is_seen(tmp_path: Path) -> None:
    """One changed line in a copy of the same version."""
    home = Path(facts.__file__).parents[2]
    copy = shutil.copytree(home, tmp_path / "instep", ignore=shutil.ignore_patterns("__pycache__"))
    same = facts._hash_folder(copy)
    with (copy / "errors.py").open("a") as file:
        file.write("# \n")
    assert same == facts._hash_folder(home) != facts._hash_folder(copy)


@pytest.mark.real
def test_machines_tell_apart(tmp_path: Path) -> None:
    """Three machines of one kernel; asking one twice gives the same."""
    need_namespaces()
    code = "from instep.launch.preflight import facts; print(facts._identity(), facts.interfaces())"
    with hosts(["n1", "n2"], docker=True) as (n1, n2):
        said = [one.run([sys.executable, "-c", code], limit_s=20).ok().out for one in (n1, n1, n2)]
    assert said[0] == said[1] != said[2]
    assert "['docker0', '172.17.0.1', 16]" in said[0]
    assert "['eth0', '10.88.0.1', 24]" in said[0]


# ---- the shared folder

LOOK = "import json, sys; from instep.launch.preflight import shared; print(json.dumps(shared.look(json.loads(sys.argv[1]))))"


@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "seen"),
    [
        ("true", ""),
        ("mount -t tmpfs tmpfs RUNS", "not shared"),
        ("mount -t tmpfs tmpfs RUNS/..", "not shared"),
        ("mount --bind RUNS RUNS && mount -o remount,bind,ro RUNS", "not writable: Read-only file system"),
    ],
)
def test_what_another_machine_sees(tmp_path: Path, command: str, seen: str) -> None:
    need_namespaces()
    runs = tmp_path / "above" / "runs"
    with hosts(["n1"]) as (machine,), shared.Token(runs) as token:
        machine.run(["sh", "-c", command.replace("RUNS", str(runs))], limit_s=10).ok()
        said = machine.run([sys.executable, "-c", LOOK, json.dumps(token.asked())], limit_s=20).ok().out
        assert token.seen({"shared": json.loads(said)}) == seen


def test_a_copy_is_not_the_folder(tmp_path: Path) -> None:
    """Who has a copy reads the token, too; what it writes does not come back."""
    with shared.Token(tmp_path / "runs") as token:
        shutil.copytree(tmp_path / "runs", tmp_path / "copy")
        (folder,) = (tmp_path / "copy").iterdir()
        assert token.seen({"shared": shared.look({"folder": str(folder)})}).startswith("its file does not come back")


def test_the_token_leaves_nothing(tmp_path: Path) -> None:
    with shared.Token(tmp_path / "runs"):
        assert len(list((tmp_path / "runs").iterdir())) == 1
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with shared.Token(tmp_path / "runs"):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


@pytest.mark.parametrize("runs", ["/proc/runs", "/dev/null/runs", "/dev/null", "/" + "x" * 300])
def test_runs_that_cannot_be(runs: str) -> None:
    from instep.errors import RunError

    with pytest.raises(RunError, match="the folder of runs cannot be written") as caught:
        shared.Token(Path(runs))
    assert "--runs DIR" in caught.value.cure
