"""What was saved is what is loaded: on any number of ranks, while training goes on."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import instep
from instep.errors import CheckpointError
from instep.train.checkpoints import CheckpointFolder
from tests.harness import run_ranks
from tests.train.checkpoints.states import hidden, save, standing, state_of, step_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("asynchronous", [False, True])
def test_comes_back(tmp_path: Path, asynchronous: bool) -> None:
    folder = CheckpointFolder(tmp_path, asynchronous=asynchronous)
    odd: dict[str, Any] = {
        "empty": torch.empty(0),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "view": torch.arange(10)[3:5],
        "flag": torch.tensor(True),
        "complex": torch.tensor([1 + 2j]),
        "parameter": torch.nn.Parameter(torch.tensor([1.5])),
        "in": [{"a": (torch.ones(1), "x", None)}, b"bytes"],
    }
    shared = {"schedule": {"last": 3, "by": (1, 2)}, "ema": [torch.tensor([4.0]), {"n": torch.tensor(5)}], "none": None}
    own = {"rng": torch.get_rng_state()}
    news = folder.save(7, odd, shared, own, {"epoch": 2, "value": 0.5}) + folder.wait()
    assert news == [tmp_path / "step-7"]
    assert hidden(tmp_path) == []

    into: dict[str, Any] = {
        "empty": torch.empty(0),
        "half": torch.zeros(2, 2, dtype=torch.bfloat16),
        "turned": torch.zeros(3, 2),
        "view": torch.zeros(2, dtype=torch.int64),
        "flag": torch.tensor(False),
        "complex": torch.tensor([0j]),
        "parameter": torch.nn.Parameter(torch.tensor([0.0])),
        "in": [{"a": (torch.zeros(1), "y", 9)}, b""],
    }
    tensors = {key: value for key, value in into.items() if isinstance(value, torch.Tensor)}
    found = folder.find("latest")
    assert found is not None
    loaded = folder.load(found, into)
    for key, value in odd.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(into[key], value), key
            assert into[key] is tensors[key]  # filled in place
    assert into["in"][0]["a"][1:] == ("x", None)
    assert into["in"][0]["a"][0] == 1
    assert into["in"][1] == b"bytes"
    assert loaded.shared["schedule"] == {"last": 3, "by": (1, 2)}
    assert [float(loaded.shared["ema"][0]), int(loaded.shared["ema"][1]["n"])] == [4.0, 5]
    assert loaded.own is not None
    assert torch.equal(loaded.own["rng"], own["rng"])
    assert (loaded.manifest["epoch"], loaded.manifest["step"], loaded.manifest["world_size"]) == (2, 7, 1)
    assert loaded.manifest["versions"]["torch"] == torch.__version__
    folder.close()


def test_training_may_change_the_tensors_at_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    state = state_of(1, size=200_000)
    for step in (1, 2, 3):
        for tensor in state["model"].values():
            tensor.fill_(step)
        state["optimizer"]["state"][0]["exp_avg"].fill_(step)
        state["optimizer"]["state"][0]["step"].fill_(step)
        state["optimizer"]["param_groups"][0]["lr"] = float(step)
        folder.save(step, state, {}, {}, {})
        for tensor in state["model"].values():
            tensor.fill_(-1)
        state["optimizer"]["param_groups"][0]["lr"] = -1.0
    folder.close()
    for step in (2, 3):
        into = state_of(0, size=200_000)
        found = folder.find(step)
        assert found is not None
        folder.load(found, into)
        assert step_in(into) == step


def test_world_size_changes_4_2_1_3(tmp_path: Path) -> None:
    def work(before: int, path: str) -> Any:
        folder = CheckpointFolder(path, asynchronous=before % 2 == 0)
        state, own = state_of(0), None
        found = folder.find("latest")
        if found is not None:
            loaded = folder.load(found, state)
            own = loaded.own
            assert torch.equal(loaded.shared["ema"], torch.full((5,), step_in(state)))
        at = step_in(state)
        step = before + 1
        folder.save(step, state_of(step), {"ema": torch.full((5,), float(step))}, {"rank": instep.rank()}, {})
        folder.wait()
        again = folder.find(step)
        assert again is not None
        loaded = folder.load(again, state)
        assert loaded.own == {"rank": instep.rank()}
        assert step_in(state) == step
        folder.close()
        return at, own

    for before, ranks in enumerate((4, 2, 1, 3)):
        assert run_ranks(work, ranks, before, str(tmp_path)) == [(float(before), None)] * ranks
    files = {entry.name for entry in (tmp_path / "step-4").iterdir()}
    assert {"rank-0.pt", "rank-1.pt", "rank-2.pt", "__2_0.distcp"} <= files
    sizes = [(tmp_path / "step-4" / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert min(sizes) > 0  # the tensors that all ranks have are written by one rank each


def test_fsdp_to_another_world_size_and_to_one_process(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        if instep.world_size() > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in model:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def full(state: dict[str, Any]) -> dict[str, Any]:
        return {k: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for k, v in state["model"].items()}

    def work(path: str, first: bool, asynchronous: bool) -> Any:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = build()
        if first:
            for _ in range(3):
                model(torch.ones(2, 5)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
        folder = CheckpointFolder(path, asynchronous=asynchronous)
        if first:
            folder.prepare(state)
            for step in (3, 4):
                folder.save(step, state, {}, {}, {})
            folder.wait()
        else:
            found = folder.find("latest")
            assert found is not None
            folder.load(found, state)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        folder.close()
        momenta = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, moments in state["optimizer"]["state"].items()
            for key, value in ((f"{name}.{what}", one) for what, one in moments.items())
        }
        return full(state), {key: torch.as_tensor(value).clone() for key, value in momenta.items()}

    for asynchronous in (True, False):
        path = str(tmp_path / str(asynchronous))
        saved = run_ranks(work, 2, path, True, asynchronous)[0]
        for ranks in (3, 1):
            for weights, momenta in run_ranks(work, ranks, path, False, asynchronous):
                assert weights.keys() == saved[0].keys()
                assert all(torch.equal(weights[key], saved[0][key]) for key in weights)
                assert momenta.keys() == saved[1].keys()
                assert all(torch.equal(momenta[key], saved[1][key]) for key in momenta)


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        save(folder, step, best=step == 2)
    assert standing(tmp_path) == ["step-2", "step-4", "step-5"]
    best = folder.find("best")
    assert best is not None
    assert best.step == 2
    save(folder, 6, best=True)
    assert standing(tmp_path) == ["step-2", "step-5", "step-6"]  # step 2 is held by find()
    folder.close()
    save(folder, 7)
    assert standing(tmp_path) == ["step-6", "step-7"]
    folder.close()


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    for number in (1, 2):  # within one process, and of an earlier one
        folder = CheckpointFolder(tmp_path)
        for text in ("a", "b"):
            folder.save(4, state_of(4), {"text": f"{text}{number}"}, {}, {})
            folder.wait()
        found = folder.find(4)
        assert found is not None
        assert folder.load(found, state_of(0)).shared == {"text": f"b{number}"}
        folder.close()
    assert standing(tmp_path) == ["step-4"]
    assert hidden(tmp_path) == []


def test_latest_is_the_one_written_last(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20, 30):
        save(folder, step)
    save(folder, 5)  # went back to an earlier step, and on from there
    found = folder.find("latest")
    assert found is not None
    assert found.step == 5
    assert standing(tmp_path) == ["step-5", "step-30"]
    folder.close()


def test_foreign_folder_in_the_way_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "theirs.txt").write_text("precious")
    folder = CheckpointFolder(tmp_path)
    assert save(folder, 1) == [tmp_path / "step-1"]
    assert (tmp_path / "step-1.old-0" / "theirs.txt").read_text() == "precious"
    folder.close()


def test_poll_says_once_what_stands(tmp_path: Path) -> None:
    def work(path: str) -> Any:
        folder = CheckpointFolder(path)
        assert folder.poll() == []
        news = folder.save(1, state_of(1), {}, {}, {})
        while not news:
            news = folder.poll()
        assert folder.poll() == folder.wait() == []
        news += folder.save(2, state_of(2), {}, {}, {})
        news += folder.close()
        return [path.name for path in news], [held.step for held in folder.held], folder.held[-1].total_s > 0

    assert run_ranks(work, 2, str(tmp_path)) == [(["step-1", "step-2"], [1, 2], True)] * 2


def test_ranks_with_different_tensors_each(tmp_path: Path) -> None:
    """As ZeRO has them: each rank the optimizer state of its own part."""

    def work(path: str) -> Any:
        folder, me = CheckpointFolder(path), instep.rank()
        state = {"model": {"w": torch.ones(3)}, "optimizer": {f"moment of {me}": torch.full((4,), float(me))}}
        folder.save(1, state, {}, {}, {})
        folder.wait()
        into = {"model": {"w": torch.zeros(3)}, "optimizer": {f"moment of {me}": torch.zeros(4)}}
        found = folder.find()
        assert found is not None
        folder.load(found, into)
        folder.close()
        return float(into["model"]["w"][0]), float(into["optimizer"][f"moment of {me}"][0])

    assert run_ranks(work, 2, str(tmp_path)) == [(1.0, 0.0), (1.0, 1.0)]


def test_state_that_changes_its_keys_is_divided_anew(tmp_path: Path) -> None:
    def work(path: str) -> Any:
        folder = CheckpointFolder(path)
        sizes = []
        for step, count in ((1, 2), (2, 5)):
            state = {f"w{n}": torch.full((n + 1,), float(step)) for n in range(count)}
            folder.save(step, state, {}, {}, {})
            folder.wait()
            into = {key: torch.zeros_like(one) for key, one in state.items()}
            found = folder.find(step)
            assert found is not None
            folder.load(found, into)
            assert all(bool((one == step).all()) for one in into.values())
            sizes.append(folder.held[-1].size)
        folder.close()
        return sizes

    first, second = run_ranks(work, 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == [4 * 3, 4 * 15]


def test_manifest_is_for_people(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(3, state_of(3), {}, {}, {"epoch": 1, "fingerprint": "abc", "step": 99})
    folder.close()
    text = json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    assert (text["epoch"], text["fingerprint"], text["step"]) == (1, "abc", 3)
    assert set(text["files"]) == {entry.name for entry in (tmp_path / "step-3").iterdir()} - {"manifest.json"}


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder("checkpoints")
    os.chdir("/")
    assert save(folder, 1) == [tmp_path / "checkpoints" / "step-1"]
    folder.close()


def test_prepare_needs_a_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used") as caught:
        CheckpointFolder(tmp_path / "file" / "checkpoints").prepare()
    assert "file" in str(caught.value)
