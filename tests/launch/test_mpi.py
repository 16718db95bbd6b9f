"""Which mpirun it is, and the command lines by which each starts ranks: golden tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.errors import RunError
from instep.launch.tasks.mpi import (
    MPICH_4,
    OPENMPI_4,
    OPENMPI_5,
    Flavour,
    Network,
    argv,
    argv_in_order,
    check_names,
    find,
    flags as mpi_flags,
    read_version,
)
from instep.launch.tasks.srun import Allocation, allocation, argv as srun_argv, counts, flags as srun_flags, is_inside

HOSTS = [("n1", 2), ("n2", 1)]
NETWORK = Network("10.77.0.0/24", "eth0", Path("/etc/my ssh"), Path("/tmp/x/ssh"))
COMMAND = ["python", "train.py"]
INTEL = Flavour("intelmpi", (2021, 8), "mpiexec")


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "openmpi", (4, 1, 4)),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", "openmpi", (4, 1, 4)),
        ("mpirun (Open MPI) 5.0.7\n", "openmpi", (5, 0, 7)),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich", (4, 0, 2)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129 (id: 339ec755a1)", "intelmpi", (2021, 8)),
        ("slurmrun 3", None, None),
        ("", None, None),
    ],
)
def test_whose_mpirun_it_is(text: str, kind: str | None, version: tuple[int, ...] | None) -> None:
    found = read_version(text, "/usr/bin/mpirun")
    assert (found and found.kind, found and found.version) == (kind, version)
    assert found is None or found.program == "/usr/bin/mpirun"


GOLDEN = [
    (
        OPENMPI_4,
        (
            "mpirun --host n1:2,n2:1 --bind-to none --mca btl_tcp_if_include 10.77.0.0/24 "
            "--mca oob_tcp_if_include 10.77.0.0/24 --mca plm_rsh_agent|ssh -F '/etc/my ssh'|--mca plm_rsh_no_tree_spawn 1 "
            "--allow-run-as-root -x A -x B python train.py"
        ),
    ),
    (
        OPENMPI_5,
        (
            "mpirun --host n1:2,n2:1 --bind-to none --mca btl_tcp_if_include 10.77.0.0/24 "
            "--prtemca prte_if_include 10.77.0.0/24 --prtemca plm_ssh_agent|ssh -F '/etc/my ssh'|"
            "--prtemca plm_ssh_no_tree_spawn 1 --allow-run-as-root -x A -x B python train.py"
        ),
    ),
    (
        MPICH_4,
        (
            "mpiexec -hosts n1:2,n2:1 -n 3 -bind-to none -iface eth0 -launcher ssh -launcher-exec /tmp/x/ssh "
            "-genvall python train.py"
        ),
    ),
    (
        INTEL,
        (
            "mpiexec -hosts n1:2,n2:1 -n 3 -genv I_MPI_PIN off -iface eth0 -bootstrap ssh -bootstrap-exec /tmp/x/ssh "
            "-genvall python train.py"
        ),
    ),
]


@pytest.mark.parametrize(("flavour", "line"), GOLDEN, ids=lambda value: getattr(value, "title", ""))
def test_the_command_line(flavour: Flavour, line: str) -> None:
    given = mpi_flags(flavour, HOSTS, network=NETWORK, names=["A", "B"], is_root=True)
    first, *rest = line.split("|")
    words = first.split() + (([rest[0], *rest[1].split()]) if rest else [])
    assert argv(flavour, given, COMMAND) == words
    assert all(flag.why for flag in given)


def test_without_wishes_there_are_few_flags() -> None:
    assert argv(OPENMPI_4, mpi_flags(OPENMPI_4, HOSTS), COMMAND) == [
        *("mpirun", "--host", "n1:2,n2:1", "--bind-to", "none", "python", "train.py"),
    ]
    assert argv(MPICH_4, mpi_flags(MPICH_4, HOSTS, names=["A"], only=True), COMMAND) == [
        *("mpiexec", "-hosts", "n1:2,n2:1", "-n", "3", "-bind-to", "none", "-genvlist", "A", "python", "train.py"),
    ]


def test_open_mpi_leaves_parts_in_their_order() -> None:
    given = mpi_flags(OPENMPI_4, HOSTS, names=["A"], is_root=True)
    assert argv_in_order(OPENMPI_4, given, HOSTS, COMMAND) == [
        *("mpirun", "--bind-to", "none", "--allow-run-as-root"),
        *("-np", "2", "--host", "n1:2", "-x", "A", "python", "train.py"),
        *(":", "-np", "1", "--host", "n2:1", "-x", "A", "python", "train.py"),
    ]
    assert argv_in_order(OPENMPI_5, mpi_flags(OPENMPI_5, HOSTS), HOSTS, COMMAND) == [
        *("mpirun", "--bind-to", "none", "--map-by", "seq", "--host", "n1,n1,n2", "python", "train.py"),
    ]


@pytest.mark.parametrize(
    ("name", "what"), [("anna@n1", "cannot be told another user"), ("fe80::1", "cannot be given an IPv6 address")]
)
def test_names_that_mpirun_does_not_take(name: str, what: str) -> None:
    with pytest.raises(RunError, match=what) as caught:
        check_names(["n1", name])
    assert "~/.ssh/config" in caught.value.cure


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="there is no mpirun on this machine") as caught:
        find()
    assert "apt-get install openmpi-bin" in caught.value.cure
    assert f"PATH={tmp_path}" in caught.value.evidence[0]


def test_a_program_that_is_no_mpirun(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho run, run\n")
    program.chmod(0o700)
    with pytest.raises(RunError, match="is not known: neither Open MPI nor MPICH nor Intel MPI") as caught:
        find(str(program))
    assert caught.value.evidence == ("run, run",)


# ---- srun

SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),2",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_RESTART_COUNT": "1",
}


def test_what_an_allocation_grants() -> None:
    assert allocation(SALLOC) == Allocation("7", ("n1", "n2", "n3"), (4, 4, 2), (2, 2, 1), restart=1)
    unasked = {name: value for name, value in SALLOC.items() if name != "SLURM_NTASKS"}
    assert allocation(unasked).tasks == ()  # Slurm fills in 1 for each
    assert allocation({**SALLOC, "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "2"}).gpus == 4
    assert allocation({**SALLOC, "SLURM_GPUS_PER_NODE": "a100:8"}).gpus == 8
    with pytest.raises(RunError, match="this is no Slurm allocation"):
        allocation({"SLURM_JOB_NODELIST": "n1"})


def test_only_an_allocation_is_one() -> None:
    assert is_inside(SALLOC)
    assert not is_inside({**SALLOC, "INSTEP_JOB": "run-1"})  # a rank of a run in it
    assert not is_inside({})


@pytest.mark.parametrize(
    ("nproc", "environ", "expected"),
    [
        ("3", SALLOC, [3, 3, 3]),
        ("auto", SALLOC, [2, 2, 1]),
        ("auto", {**SALLOC, "SLURM_NTASKS": "", "SLURM_GPUS_ON_NODE": "4"}, [4, 4, 4]),
        ("auto", {**SALLOC, "SLURM_NTASKS": ""}, [1, 1, 1]),
    ],
)
def test_how_many_ranks(nproc: str, environ: dict[str, str], expected: list[int]) -> None:
    granted = allocation(environ)
    assert counts(nproc, granted, granted.hosts) == expected


def test_ranks_that_cannot_be() -> None:
    granted = allocation(SALLOC)
    with pytest.raises(RunError, match="--nproc 0 is no number of ranks"):
        counts("0", granted, granted.hosts)
    with pytest.raises(RunError, match="n9 is not in this allocation") as caught:
        counts("1", granted, ["n1", "n9"])
    assert caught.value.evidence == ("job 7: n1, n2, n3",)


@pytest.mark.parametrize(
    ("environ", "parts", "line"),
    [
        (
            SALLOC,
            [("n1", 2), ("n2", 2)],
            (
                "srun --ntasks=4 --distribution=arbitrary --nodelist=n1,n1,n2,n2 --cpus-per-task=2 "
                "--kill-on-bad-exit=1 --overlap --export=ALL"
            ),
        ),
        (
            SALLOC,
            [("n3", 2), ("n1", 1)],  # 2 cores, 4 cores
            (
                "srun --ntasks=3 --distribution=arbitrary --nodelist=n3,n3,n1 --cpus-per-task=1 "
                "--kill-on-bad-exit=1 --overlap --export=ALL"
            ),
        ),
        (
            {**SALLOC, "SLURM_CPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "2"},
            [("n3", 2)],
            (
                "srun --ntasks=2 --distribution=arbitrary --nodelist=n3,n3 --cpus-per-task=2 "
                "--kill-on-bad-exit=1 --overlap --export=ALL --overcommit --gpu-bind=none"
            ),
        ),
    ],
)
def test_the_srun(environ: dict[str, str], parts: list[tuple[str, int]], line: str) -> None:
    given = srun_flags(allocation(environ), parts)
    assert srun_argv(given, ["task"]) == [*line.split(), "task"]
    assert all(flag.why for flag in given)
