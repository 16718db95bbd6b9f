"""Request + machine + environment -> plan, and what cannot be planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instep.errors import RunError
from instep.launch.planning.devices import count_gpus, visible
from instep.launch.planning.machine import Machine, count_cores, this_machine
from instep.launch.planning.place import alone, rank_environment
from instep.launch.planning.plan import Request, Site, make_plan
from instep.launch.planning.target import Target

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = Target("script", "train.py", ("--lr", "0.1 x"))


def _machine(cores: int = 8, gpus: int = 0) -> list[Site]:
    return [Site("host", Machine("host", cores, gpus, (20_000, 29_499), (32_768, 60_999)))]


@pytest.mark.parametrize(
    ("nproc", "device", "cores", "gpus", "ranks", "on", "threads"),
    [
        ("1", "auto", 8, 0, 1, "cpu", 8),
        ("2", "auto", 8, 0, 2, "cpu", 4),
        ("3", "auto", 8, 0, 3, "cpu", 2),
        ("16", "auto", 8, 0, 16, "cpu", 1),
        ("64", "cpu", 1, 0, 64, "cpu", 1),
        ("auto", "auto", 8, 0, 1, "cpu", 8),
        ("auto", "cpu", 8, 4, 1, "cpu", 8),
        ("auto", "auto", 8, 4, 4, "cuda", 2),
        ("auto", "cuda", 8, 4, 4, "cuda", 2),
        ("2", "cuda", 8, 4, 2, "cuda", 4),
        ("6", "cpu", 8, 4, 6, "cpu", 1),
        ("1024", "cpu", 128, 0, 1024, "cpu", 1),
    ],
)
def test_ranks_device_and_threads(
    nproc: str, device: str, cores: int, gpus: int, ranks: int, on: str, threads: int
) -> None:
    plan = make_plan(Request(SCRIPT, nproc, device), _machine(cores, gpus), {})
    assert (plan.world_size, plan.device, plan.threads) == (ranks, on, threads)
    assert plan.nodes[0].variables["OMP_NUM_THREADS"] == str(threads)
    assert plan.nodes[0].variables.get("CUDA_VISIBLE_DEVICES") == ("" if device == "cpu" else None)
    assert bool(plan.why) == (nproc == "auto")


@pytest.mark.parametrize("nproc", ["0", "-3", "x", "", "1.5", "1e3", "100000", "9" * 30])
def test_no_number_of_ranks(nproc: str) -> None:
    with pytest.raises(RunError) as caught:
        make_plan(Request(SCRIPT, nproc), _machine(), {})
    assert f"--nproc {nproc}" in str(caught.value)
    assert caught.value.cure


@pytest.mark.parametrize(("nproc", "device"), [("3", "auto"), ("3", "cuda")])
def test_more_ranks_than_gpus(nproc: str, device: str) -> None:
    with pytest.raises(RunError, match="3 ranks need 3 GPUs; host has 2") as caught:
        make_plan(Request(SCRIPT, nproc, device), _machine(gpus=2), {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert "--device cpu" in caught.value.cure
    assert caught.value.evidence == ("CUDA_VISIBLE_DEVICES=4,5",)


def test_no_gpu_at_all() -> None:
    with pytest.raises(RunError, match="no NVIDIA GPU"):
        make_plan(Request(SCRIPT, "1", "cuda"), _machine(), {})


@pytest.mark.parametrize("grace", [-1.0, float("nan"), float("inf")])
def test_no_time_to_wait(grace: float) -> None:
    with pytest.raises(RunError, match="--grace"):
        make_plan(Request(SCRIPT, grace=grace), _machine(), {})


def test_what_the_user_has_set_stays() -> None:
    plan = make_plan(Request(SCRIPT, "2"), _machine(), {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert plan.threads == 3
    assert "you set it" in plan.nodes[0].threads_why
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in plan.nodes[0].variables


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (SCRIPT, "train.py --lr '0.1 x'"),
        (Target("module", "pkg.train", ("-x",)), "-m pkg.train -x"),
        (Target("folder", "code"), "code"),
    ],
)
def test_the_torchrun_command(target: Target, words: str) -> None:
    plan = make_plan(Request(target, "4", "cpu"), _machine(), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    settings = "OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=''"
    assert plan.torchrun() == f"{settings} torchrun --standalone --nproc-per-node=4 {words}"


def test_the_environment_of_a_rank() -> None:
    found = rank_environment(1, alone(3), 20_000, "job", "/runs/a")
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0",
    }  # fmt: skip
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "20000", "job")


@pytest.mark.parametrize(
    ("present", "mask", "seen"),
    [
        (4, None, 4),
        (0, None, 0),
        (4, "", 0),
        (4, "-1", 0),
        (4, "0", 1),
        (4, "2,0", 2),
        (4, " 1 , 3 ", 2),
        (4, "0,9,1", 1),
        (4, "0,0", 1),
        (4, "NoDevFiles", 0),
        (4, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        (1, "MIG-a,MIG-b", 2),
        (0, "0,1", 0),
    ],
)
def test_visible_gpus(present: int, mask: str | None, seen: int) -> None:
    assert visible(present, mask) == seen


def test_gpus_are_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 3


def test_this_machine() -> None:
    machine = this_machine({})
    assert machine.cores == count_cores() >= 1
    first, last = machine.ports
    low, high = machine.ephemeral
    assert last < low or first > high
