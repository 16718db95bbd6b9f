"""The commands of ``--dry-run``, typed on three machines as a user would: they compute what ``instep run`` does."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.commands import run_command
from tests.launch.jobs import INSTEP, Place
from tests.needs import need_tool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines import Sandbox

pytestmark = pytest.mark.real
PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.zeros(dist.get_world_size(), dtype=torch.int64)
total[dist.get_rank()] = 1 + dist.get_rank()
dist.all_reduce(total)
sys.stdout.write(" ".join(map(str, ["sums", *total.tolist(), *sys.argv[1:]])) + "\\n")  # at once: nothing comes between
dist.destroy_process_group()
"""
WORDS = ["sums.py", "a b", "$x"]
SUMS = "sums 1 2 3 4 a b $x"  # four ranks, two of them on n1


@pytest.fixture
def place(sandbox: Sandbox) -> Place:
    made = Place(sandbox.folder(), torch=True)
    made.write("sums.py", PROGRAM)
    return made


def inventory(sandbox: Sandbox, place: Place, head: str = "") -> list[str]:
    """Two ranks on the first machine, one on each of the others."""
    machines = "".join(f'[[machines]]\nname = "{node}"\nslots = {2 if node == "n1" else 1}\n' for node in sandbox.nodes)
    at = f'head = "{head}"\n' if head else ""
    place.write("inventory.toml", f'ssh_config = "{sandbox.ssh_config}"\n{at}{machines}')
    return ["--inventory", "inventory.toml"]


def shown(text: str) -> dict[str, dict[str, str]]:
    """Launcher -> machine -> what is to be typed there."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"(?m)^# ---- ", text)[1:]:
        name = part.partition(": ")[0]
        commands = re.findall(r"(?ms)^(# on ([^:]*): .*?^\))(?:\n\n|\Z)", part.strip())
        found[name] = {node: text for text, node in commands}
    return found


def typed(sandbox: Sandbox, texts: dict[str, str]) -> dict[str, list[str]]:
    """What is said on each machine when these lines are typed on all of them at once."""
    said: dict[str, list[str]] = {}

    def type_on(node: str) -> None:
        argv = ["ssh", "-F", str(sandbox.ssh_config), node, "bash"]
        result = run_command(argv, stdin=f"{texts[node]}\n", limit_s=60).ok()
        said[node] = sums(result.out)

    threads = [threading.Thread(target=type_on, args=(node,)) for node in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == sorted(texts), "a command failed: see above"
    return said


def sums(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("sums")]


@pytest.mark.parametrize(
    ("name", "words"),
    [("torchrun", []), ("torchrun, elastic", ["--nodes", "2:3"]), ("torch.distributed.launch", [])],
)
def test_typed_on_each_machine(sandbox: Sandbox, place: Place, name: str, words: list[str]) -> None:
    result = place.run(*inventory(sandbox, place), *words, "--dry-run", *WORDS).ok()
    found = shown(result.out)
    assert typed(sandbox, found[name]) == {"n1": [SUMS] * 2, "n2": [SUMS], "n3": [SUMS]}
    assert place.runs == []


def test_instep_itself(sandbox: Sandbox, place: Place) -> None:
    """The same sums; and the commands as JSON are those of the text."""
    given = inventory(sandbox, place)
    result = place.run(*given, "--show", "all", *WORDS).ok()
    assert sorted(result.out.splitlines()) == [
        f"[rank {rank} on {node}] {SUMS}" for rank, node in enumerate(("n1", "n1", "n2", "n3"))
    ]
    values: dict[str, Any] = json.loads(place.run(*given, "--dry-run", "--json", *WORDS).ok().out)
    assert [(node["host"], node["ranks"]) for node in values["nodes"]] == [("n1", [0, 1]), ("n2", [2]), ("n3", [3])]
    torchrun = values["commands"][0]
    assert [command["host"] for command in torchrun["commands"]] == ["n1", "n2", "n3"]
    for command in torchrun["commands"]:
        assert command["argv"][-3:] == WORDS
        assert f"--master-port={values['port']}" in command["argv"]


def test_mpirun_typed_on_the_head(sandbox: Sandbox, place: Place) -> None:
    need_tool("mpirun.openmpi")
    text = place.run(*inventory(sandbox, place, "n1"), "--dry-run", *WORDS).ok().out
    (name,) = [name for name in shown(text) if "MPI" in name]
    assert typed(sandbox, shown(text)[name]) == {"n1": [SUMS] * 4}


def test_mpiexec_typed_here(sandbox: Sandbox, place: Place) -> None:
    """On none of the machines: they are reached by the ssh configuration of the inventory."""
    need_tool("mpiexec.mpich")
    given = [*inventory(sandbox, place), "--via", "mpirun", "--mpirun", "mpiexec.mpich"]
    found = shown(place.run(*given, "--dry-run", *WORDS).ok().out)
    first = next(iter(found))
    assert first.startswith("MPICH")
    said = run_command(["bash"], stdin=found[first]["this machine"], limit_s=60).ok().out
    assert sums(said) == [SUMS] * 4


def test_the_file_for_sbatch(sandbox: Sandbox, place: Place) -> None:
    text = place.run(*inventory(sandbox, place, "n1"), "--dry-run", "sums.py").ok().out
    argv = ["ssh", "-F", str(sandbox.ssh_config), "n1", "bash"]
    said = run_command(argv, stdin=f"{shown(text)['sbatch']['n1']}\n", limit_s=30).ok().out
    number = re.fullmatch(r"Submitted batch job (\d+)\n", said)
    assert number
    output = place.path / f"sums-{number[1]}.txt"
    wait = f"for i in $(seq 300); do grep -q finished {output.name} && break; sleep 0.1; done"
    sandbox.exec("n1", ["bash", "-c", wait], cwd=place.path, limit_s=60).ok()
    assert sums(output.read_text()) == ["sums 1 2 3 4"], output.read_text()


def test_srun_typed_in_an_allocation(sandbox: Sandbox, place: Place) -> None:
    inside = f"{INSTEP} run --dry-run sums.py 'a b' '$x' > dry.txt && sed -n '/^# ---- srun/,/^)$/p' dry.txt | bash"
    words = ["salloc", "--quiet", "--nodes=3", "--ntasks=4", "bash", "-c", inside]
    result = sandbox.exec("n1", words, cwd=place.path, limit_s=90).ok()
    assert sums(result.out) == [SUMS] * 4
    assert "ranks       4 on 3 machines" in (place.path / "dry.txt").read_text()
    assert sys.executable in (place.path / "dry.txt").read_text()
    assert place.runs == []


MISTAKES: list[tuple[list[str], str]] = [
    (["--hosts", "nowhere.invalid:1"], "nowhere.invalid"),
    (["--hosts", "h1:0"], "h1"),
    (["--via", "ssh"], "--via ssh needs machines"),
    (["--via", "local", "--hosts", "h1"], "--via local"),
    (["--nodes", "3:2", "--hosts", "h1,h2"], "--nodes 3:2"),
    (["--nodes", "4", "--hosts", "localhost"], "--nodes"),
    (["--hosts", "localhost", "--env", "1A=2"], "--env"),
    (["--hosts", "localhost", "--nproc", "0"], "--nproc 0"),
    (["--hosts", "localhost", "--python", "/no/python"], "/no/python"),
    (["--mpirun", "no-such-mpirun", "--via", "mpirun", "--hosts", "localhost"], "no such program"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_what_cannot_be_planned(tmp_path: Path, words: list[str], said: str) -> None:
    place = Place(tmp_path, torch=False)
    place.write("sums.py", "print()")
    result = place.run(*words, "--dry-run", "sums.py")
    assert result.rc == 2, str(result)
    assert result.out == ""
    assert said in result.err
    assert "Traceback" not in result.err
    assert place.runs == []
