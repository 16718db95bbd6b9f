"""The commands of other launchers: their text, and that bash reads them as they are meant."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from instep.launch.planning import render
from instep.launch.planning.machine import Machine
from instep.launch.planning.plan import Plan, Request, Site, make_plan
from instep.launch.planning.target import Target
from instep.launch.tasks import mpi, srun
from tests.commands import run_command

SCRIPT = Target("script", "train.py", ("--lr", "0.1 x"))
ENVIRON = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def sites(*counts: int, names: tuple[str, ...] = (), interfaces: tuple[str, ...] = ()) -> list[Site]:
    found = []
    for number, count in enumerate(counts):
        machine = Machine(f"m{number}", 4, 0, (20_000, 29_499), (32_768, 60_999))
        interface = interfaces[number] if interfaces else "eth0"
        name = names[number] if names else f"n{number + 1}"
        found.append(Site(name, machine, count, f"10.0.0.{number + 1}", interface))
    return found


def setup(plan: Plan, **changed: Any) -> render.Setup:
    given = {"python": "/venv/bin/python", "cwd": "/work", "port": 20_159, "environ": ENVIRON, **changed}
    return render.Setup(plan, **given)


def three(target: Target = SCRIPT, **changed: Any) -> Plan:
    return make_plan(Request(target, device="cpu"), sites(2, 1, 1, **changed), ENVIRON)


def test_torchrun_on_three_machines() -> None:
    assert (
        render.torchrun(setup(three())).lines()[:22]
        == r"""
# ---- torchrun: on each machine its own command, in any order: they wait for each other

# on n1: ranks 0 to 1
(
  cd /work || exit                             # the working folder
  export OMP_NUM_THREADS=2                     # CPU threads of each rank: 4 cores / 2 ranks
  export CUDA_VISIBLE_DEVICES=''               # no GPU: --device cpu
  export GLOO_SOCKET_IFNAME=eth0               # gloo: the interface on the way to the others; else that of the host name
  export NCCL_SOCKET_IFNAME='=eth0'            # NCCL: the same; = means this very name
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=1     # as it is set here
  command=(
    /venv/bin/torchrun                         # starts the ranks of this machine
    --nnodes=3                                 # machines
    --node-rank=0                              # the number of this one; 0 is n1, which has rank 0
    --master-addr=10.0.0.1                     # where the ranks meet: an address of n1 that all have reached
    --master-port=20159                        # was free on n1 a moment ago
    --local-addr=10.0.0.1                      # of this machine; else what its host name means, often 127.0.1.1
    --nproc-per-node=2                         # ranks on this machine
    train.py --lr '0.1 x'                      # the program, and what it is given
  )
  exec "${command[@]}"
)
""".strip("\n").split("\n")
    )


def flags(way: render.Way) -> list[list[str]]:
    return [command.argv for command in way.commands]


END = ["train.py", "--lr", "0.1 x"]
STATIC = [
    ["--nnodes=3", f"--node-rank={n}", "--master-addr=10.0.0.1", "--master-port=20159"] for n in range(3)
]  # fmt: skip
ADDRESS = [f"--local-addr=10.0.0.{n}" for n in (1, 2, 3)]
COUNT = ["--nproc-per-node=2", "--nproc-per-node=1", "--nproc-per-node=1"]


def test_the_words_of_torchrun() -> None:
    tool = "/venv/bin/torchrun"
    assert flags(render.torchrun(setup(three()))) == [[tool, *STATIC[n], ADDRESS[n], COUNT[n], *END] for n in range(3)]
    module = three(Target("module", "pack.train", ("-x",)))
    assert flags(render.torchrun(setup(module)))[2][-3:] == ["-m", "pack.train", "-x"]


def test_the_words_of_the_elastic_torchrun() -> None:
    found = flags(render.elastic(setup(three()), 2, 3))
    for n, words in enumerate(found):
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:20159", "--rdzv-id=train-20159"]
        host = f"--rdzv-conf=is_host={'false' if n else 'true'}"
        assert words == ["/venv/bin/torchrun", "--nnodes=2:3", *meeting, host, ADDRESS[n], COUNT[n], *END]


def test_the_words_of_torch_distributed_launch() -> None:
    tool = ["/venv/bin/python", "-m", "torch.distributed.launch"]
    assert flags(render.distributed_launch(setup(three()))) == [
        [*tool, *STATIC[n], "--use-env", COUNT[n], *END] for n in range(3)
    ]


def test_one_machine() -> None:
    plan = make_plan(Request(SCRIPT, "2", "cpu"), sites(2), {})
    alone = setup(plan, port=0)
    assert flags(render.torchrun(alone)) == [["/venv/bin/torchrun", "--standalone", "--nproc-per-node=2", *END]]
    assert flags(render.distributed_launch(alone))[0][3:5] == ["--standalone", "--use-env"]


def test_restarts_and_ipv6() -> None:
    request = Request(SCRIPT, device="cpu", max_restarts=3)
    found = [Site(one.host, one.machine, 1, f"fd00::{n}", "eth0") for n, one in enumerate(sites(1, 1), 1)]
    made = setup(make_plan(request, found, {}))
    assert "--master-addr=fd00::1" in flags(render.torchrun(made))[1]
    assert "--max-restarts=3" in flags(render.torchrun(made))[1]
    assert "--rdzv-endpoint=[fd00::1]:20159" in flags(render.elastic(made, 1, 2))[1]


# ---- mpirun

SHIM = (
    "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK"
    ' LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE; exec "$@"'
)
NETWORK = mpi.Network("10.0.0.0/24", "eth0", Path("/s/ssh config"))


def test_the_words_of_mpirun() -> None:
    plan = make_plan(Request(SCRIPT, device="cpu"), sites(1, 1), {**ENVIRON, "OMP_NUM_THREADS": "2"})
    made = setup(plan, network=NETWORK, environ={})
    own = mpi.flags(
        mpi.OPENMPI_5,
        [("n1", 1), ("n2", 1)],
        network=NETWORK,
        names=[
            "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
            "MASTER_ADDR", "MASTER_PORT",
        ],
    )  # fmt: skip
    (words,) = flags(render.mpirun(made, mpi.OPENMPI_5))
    program = ["bash", "-c", SHIM, "rank", "/venv/bin/python", *END]
    assert words == ["mpirun", *(word for flag in own for word in flag.words), *program]


def test_variables_that_differ_between_machines() -> None:
    """mpirun hands all ranks the same: what differs is chosen by the rank's own shell."""
    made = setup(three(interfaces=("eth0", "ib0", "ib0")))
    (command,) = render.mpirun(made, mpi.OPENMPI_4).commands
    assert [one.name for one in command.settings] == [
        "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "MASTER_ADDR", "MASTER_PORT",
    ]  # fmt: skip
    shim = next(word for word in command.argv if word.startswith("export RANK"))
    for host, interface, threads in (("m0", "eth0", 2), ("m1", "ib0", 4), ("m2", "ib0", 4)):
        before = f"hostname() {{ echo {host}; }}; {shim}"
        code = 'echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $OMP_NUM_THREADS "$1"'
        said = run_command(["bash", "-c", before, "rank", "bash", "-c", code, "x", "a b"], limit_s=10).ok().out
        assert said == f"{interface} ={interface} {threads} a b\n"


def test_mpich_is_given_a_program_that_knows_the_machines() -> None:
    (command,) = render.mpirun(setup(three(), network=NETWORK), mpi.MPICH_4).commands
    text = "\n".join(command.lines())
    assert '-launcher ssh -launcher-exec "$ssh"' in text
    assert "PMI_RANK" in text
    making = f'{command.before[0]} && cat "$ssh"'
    said = run_command(["bash", "-c", making], limit_s=10).ok().out
    assert said == '#!/bin/sh\nexec ssh -F /s/ssh\\ config "$@"\n'


def test_what_mpirun_cannot_be_given() -> None:
    way = render.mpirun(setup(three(names=("anna@n1", "n2", "n3"))), mpi.OPENMPI_5)
    assert way.lines() == ["# ---- Open MPI 5.0: cannot be shown: mpirun cannot be told another user: anna@n1"]


def test_the_batch_file() -> None:
    """Slurm chooses the machines, but where they have unlike numbers of ranks."""
    uneven = "\n".join(render.sbatch(setup(three())).lines())
    assert "#SBATCH --nodelist=m0,m1,m2" in uneven
    assert "--hosts m0:2,m1:1,m2:1" in uneven
    even = make_plan(Request(SCRIPT, device="cpu"), sites(2, 2), ENVIRON)
    text = "\n".join(render.sbatch(setup(even)).lines())
    assert "#SBATCH --ntasks-per-node=2" in text
    assert "--hosts" not in text
    assert "--nodelist" not in text


def test_the_words_of_srun() -> None:
    granted = srun.Allocation("7", ("n1", "n2", "n3"), cpus=(4, 4, 4))
    given = tuple(srun.flags(granted, [("n1", 2), ("n2", 1), ("n3", 1)]))
    made = setup(three(), srun=given)
    assert [way.name for way in render.ways(made, via="slurm")][:2] == ["srun", "torchrun"]
    (command,) = render.srun(made, given).commands
    own = [word for flag in given for word in flag.words]
    assert command.argv[: 1 + len(own)] == ["srun", *own]
    assert command.argv[-4:] == ["/venv/bin/python", *END]
    shim = next(word for word in command.argv if word.startswith("export RANK"))
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    code = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $OMP_NUM_THREADS"
    words = ["bash", "-c", f"hostname() {{ echo m0; }}; {shim}", "rank", "bash", "-c", code]
    assert run_command(words, env=step, limit_s=10).ok().out == "3 4 0 2 2\n"


def test_variables_that_were_asked_for() -> None:
    """What is given by name alone is not shown, and has to be there."""
    made = setup(three(), env=("A=b c", "TOKEN"), environ={**ENVIRON, "TOKEN": "secret"})
    for way in render.ways(made):
        text = "\n".join(way.lines())
        assert "secret" not in text + json.dumps(way.as_json())
        for command in way.commands:
            if command.settings:
                assert ("A", "b c") in [(one.name, one.value) for one in command.settings]
    command = render.torchrun(made).commands[0]
    short = dataclasses.replace(command, cwd="/", flags=(mpi.Flag(("printenv", "TOKEN"), "shows it"),))
    text = "\n".join(short.lines())
    assert run_command(["bash"], stdin=text, env={"TOKEN": "x y"}, limit_s=10).ok().out == "x y\n"
    assert "TOKEN" in run_command(["bash"], stdin=text, limit_s=10).err


# ---- all of them


@pytest.mark.parametrize(
    ("via", "least", "names"),
    [
        ("ssh", 0, ["torchrun", "torch.distributed.launch", "Open MPI 5.0", "Open MPI 4.1", "MPICH 4.0", "sbatch"]),
        ("mpirun", 0, ["Open MPI 5.0", "Open MPI 4.1", "MPICH 4.0", "torchrun", "torch.distributed.launch", "sbatch"]),
        ("slurm", 0, ["sbatch", "torchrun", "torch.distributed.launch", "Open MPI 5.0", "Open MPI 4.1", "MPICH 4.0"]),
        (
            "ssh",
            2,
            [
                "torchrun, elastic", "torchrun", "torch.distributed.launch", "Open MPI 5.0", "Open MPI 4.1",
                "MPICH 4.0", "sbatch",
            ],
        ),
    ],
)  # fmt: skip
def test_the_way_that_is_used_comes_first(via: str, least: int, names: list[str]) -> None:
    assert [way.name for way in render.ways(setup(three()), via=via, least=least)] == names


def test_every_flag_has_its_reason() -> None:
    for way in render.ways(setup(three(), network=NETWORK, is_root=True), least=1):
        for command in way.commands:
            assert all(flag.why for flag in command.flags)
            assert all(setting.why for setting in command.settings)
        for command in way.as_json()["commands"]:
            assert command["argv"] == [word for flag in command["flags"] for word in flag["words"]]


def test_the_plan_for_several_machines(tmp_path: Path) -> None:
    text = "\n".join(render.plan_lines(three(), tmp_path, port=20_159))
    for line in (
        "ranks       4 on 3 machines",
        "machines    n1  ranks 0 to 1  10.0.0.1 on eth0  2 threads each: 4 cores / 2 ranks",
        "            n3  rank 3        10.0.0.3 on eth0  4 threads each: 4 cores / 1 rank",
        "meeting     10.0.0.1, an address of n1 that all have reached",
        "port        20159 where it is still free, else another, kept for this run from before its first rank starts",
        "  WORLD_SIZE=4",
        "rank 2 on n2",
    ):
        assert line in text.split("\n"), text
    assert "GROUP_RANK=1" in text
    values = three().as_json()
    assert [node["ranks"] for node in values["nodes"]] == [[0, 1], [2], [3]]
    assert "torchrun" not in values
    assert json.loads(json.dumps(values)) == values


# ---- as bash reads it

NASTY = [
    "plain", "a b", "it's", 'say "x"', "$HOME", "`id`", "$(id)", "!!", "#no", "~", "*", "", "a\\b", "tab\there",
    "line\nbreak", "ü → ∞", "\x1b[31m", "-n", ";", "&", "|", ">x", "{a,b}", "\udcff\udc80", "'\t'", "END_OF_FILE",
]  # fmt: skip
PROGRAM = "import json, os, sys; json.dump([sys.argv[1:], os.environ['VALUE']], open(os.environ['TO'], 'w'))"


def nasty(tmp_path: Path) -> render.Command:
    """A command that writes down what it was given."""
    words = tuple(NASTY)
    settings = (render.Setting("VALUE", "\n".join(NASTY), "as it is"), render.Setting("TO", str(tmp_path / "found")))
    flags = (mpi.Flag((sys.executable, "-c", PROGRAM), "why"), mpi.Flag(words, "all of this # and 'that'"))
    return render.Command("n1", "words", str(tmp_path), settings, flags)


def written(tmp_path: Path) -> None:
    found, value = json.loads((tmp_path / "found").read_text())
    assert found == NASTY
    assert value == "\n".join(NASTY)


def test_a_file_for_bash(tmp_path: Path) -> None:
    text = "\n".join(nasty(tmp_path).lines())
    result = run_command(["bash"], stdin=f"{text}\necho ${{VALUE-unset}} $PWD\n", limit_s=20, cwd="/").ok()
    written(tmp_path)
    assert result.out == "unset /\n"  # nothing is left set in the user's shell
    assert result.err == ""


def test_typed_at_a_prompt(tmp_path: Path) -> None:
    """Through a terminal, where a tab completes names and ! recalls commands."""
    master, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "HISTFILE": ""},
    ) as shell:
        os.close(terminal)
        data = ("\n".join([*nasty(tmp_path).lines(), "exit"]) + "\n").encode(errors="surrogateescape")
        for start in range(0, len(data), 256):  # a terminal takes 4096 bytes at a time: read what it echoes
            os.write(master, data[start : start + 256])
            os.read(master, 1 << 16)
        try:
            while os.read(master, 1 << 16):
                pass
        except OSError:  # the shell has closed it
            pass
        os.close(master)
        assert shell.wait(20) == 0
    written(tmp_path)


def test_a_file_on_standard_input() -> None:
    text = "#!/bin/bash\necho \"$HOME\" 'x' \\\n  # more\n"
    flag = mpi.Flag(("cat",), "shows it")
    command = render.Command("n1", "a file", "/", (), (flag,), stdin=text)
    assert run_command(["bash"], stdin="\n".join(command.lines()), limit_s=10).ok().out == text
