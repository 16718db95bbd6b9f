"""What cannot be saved, found or loaded is refused with words, on all ranks, before anything is changed."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import instep
from instep.errors import CheckpointError
from instep.train.checkpoints import CheckpointFolder, Checkpoints, export
from tests.harness import run_ranks
from tests.train.checkpoints.states import save, standing, state_of, step_in

if TYPE_CHECKING:
    from pathlib import Path


class Mine:
    """An object of the user's."""


class Colour(enum.Enum):
    RED = 1


def nested_in_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["self"] = state
    return state


UNSAVABLE = {
    "lambda": (
        {"callbacks": {"0.Mine": {"fn": lambda: 1}}},
        r"callbacks\.0\.Mine\.fn: a function <lambda> at .*test_bad_input",
    ),
    "object": ({"a": [1, {"b": Mine()}]}, r"a\.1\.b: a .*Mine"),
    "enum": ({"colour": Colour.RED}, r"colour: a .*Colour"),
    "numpy number": ({"best": np.float64(0.5)}, r"best: a numpy\.float64"),
    "numpy array": ({"x": np.ones(2)}, r"x: a numpy\.ndarray"),
    "open file": ({"log": open}, r"log: a "),
    "key": ({"by": {Mine(): 1}}, r"by: its key a .*Mine"),
    "module": ({"m": torch.nn.Linear(1, 1)}, r"m: a torch\.nn.*Linear"),
    "meta tensor": ({"t": torch.empty(2, device="meta")}, r"t: a tensor without data"),
    "sparse tensor": ({"t": torch.eye(2).to_sparse()}, r"t: a tensor with layout"),
    "two of one name": ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"a\.b: two tensors"),
    "cycle": (nested_in_itself(), r"self\.self.*in itself"),
}


# The file of a rank's own state is read by torch.load alone, which takes these.
OWN = {"two of one name", "meta tensor", "sparse tensor", "cycle"}
CASES = [
    (kind, where) for kind in UNSAVABLE for where in ("tensors", "shared", "own") if where != "own" or kind not in OWN
]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path, kind: str, where: str) -> None:
    state, words = UNSAVABLE[kind]
    given: dict[str, Any] = {"tensors": {}, "shared": {}, "own": {}} | {where: state}
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=words) as caught:
        folder.save(1, given["tensors"], given["shared"], given["own"], {})
    assert "state_dict()" in caught.value.cure
    assert not folder.path.exists()


def test_on_one_rank_only_it_is_refused_on_all(tmp_path: Path) -> None:
    def work() -> Any:
        folder = CheckpointFolder(tmp_path / "checkpoints")
        own = {"hook": print if instep.rank() else 1, "fn": (lambda: 0) if instep.rank() else 2}
        with pytest.raises(CheckpointError, match="rank 1") as caught:
            folder.save(1, state_of(1), {}, own, {})
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert "own: fn: a function <lambda>" in first


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    def work() -> Any:
        with pytest.raises(CheckpointError, match="different steps") as caught:
            CheckpointFolder(tmp_path / "c").save(1 + instep.rank(), {}, {}, {}, {})
        return str(caught.value)

    assert "rank 1: step 2" in run_ranks(work, 2)[0]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match="whole number from 0"):
        CheckpointFolder(tmp_path / "c").save(step, {}, {}, {}, {})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("manifest", [{"x": {1, 2}}, {"t": torch.ones(1)}, {(1, 2): 3}])
def test_manifest_that_is_no_json(tmp_path: Path, manifest: Any) -> None:
    with pytest.raises(CheckpointError, match="plain JSON"):
        CheckpointFolder(tmp_path / "c").save(1, {}, {}, {}, manifest)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("keep", [0, -1, 1.0, True, None, "2"])
def test_keep_that_is_no_number(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(CheckpointError, match="keep"):
        CheckpointFolder(tmp_path, keep=keep)


@pytest.mark.parametrize(
    "wish",
    [
        {"keep": 0},
        {"every_steps": 0},
        {"every_steps": 2.5},
        {"every_epochs": -1},
        {"folder": 3},
        {"best": "accuracy"},
        {"asynchronous": 1},
        {"export": None},
    ],
)
def test_wishes_that_make_no_sense(wish: dict[str, Any]) -> None:
    (name,) = wish
    with pytest.raises(CheckpointError, match=name):
        Checkpoints(**wish)


def test_wishes_that_do() -> None:
    assert Checkpoints(every_steps=10, every_epochs=None, folder="x").keep == 2


@pytest.mark.parametrize("which", ["lastest", "", 3.5, None, True])
def test_find_what_is_no_name(tmp_path: Path, which: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        folder.find(which)
    folder.close()


def test_find_lists_what_there_is(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    save(folder, 1)
    save(folder, 2, best=True)
    (tmp_path / "step-5").mkdir()
    with pytest.raises(CheckpointError) as caught:
        folder.find(7)
    assert "step-2, step-1" in str(caught.value)
    assert "step-5: no manifest.json" in str(caught.value)
    with pytest.raises(CheckpointError, match="is a folder of checkpoints"):
        folder.find(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        folder.find(tmp_path / "step-77")
    other = CheckpointFolder(tmp_path / "elsewhere")
    found = other.find(tmp_path / "step-1")
    assert found is not None
    other.load(found, state := state_of(0))
    assert step_in(state) == 1
    (tmp_path / "best.json").write_text('{"step": 9}')
    with pytest.raises(CheckpointError, match="of step 9, is not there"):
        folder.find("best")
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match="Nobody knows"):
        folder.find("best")
    folder.close()


def test_another_model_changes_nothing_and_lists_the_keys(tmp_path: Path) -> None:
    def work(other: bool) -> Any:
        folder = CheckpointFolder(tmp_path)
        if not other:
            save(folder, 1)
            folder.close()
            return None
        state = state_of(0)
        state["model"]["head.weight"] = torch.zeros(2, 2)
        del state["model"]["layer.0.weight"]
        state["model"]["layer.1.weight"] = torch.zeros(5, 3)
        state["model"] |= {f"more.{n}": torch.zeros(1) for n in range(20)}
        found = folder.find()
        assert found is not None
        with pytest.raises(CheckpointError, match="another model") as caught:
            folder.load(found, state)
        assert all(bool((one == 0).all()) for one in state["model"].values())
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.0
        folder.close()
        return str(caught.value)

    run_ranks(work, 1, False)
    first, second = run_ranks(work, 2, True)
    assert first == second
    assert "not in the checkpoint (21):" in first
    assert "model.head.weight [2, 2]" in first
    assert "... and 11 more" in first
    assert "only in the checkpoint (1):" in first
    assert "model.layer.0.weight [64, 3]" in first
    assert "model.layer.1.weight: [64, 3] in the checkpoint, [5, 3] here" in first


def test_another_dtype_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"w": torch.ones(2)}, {}, {}, {})
    folder.wait()
    found = folder.find()
    assert found is not None
    folder.load(found, into := {"w": torch.zeros(2, dtype=torch.float64)})
    assert into["w"].tolist() == [1.0, 1.0]
    assert "w (torch.float32 -> torch.float64)" in capsys.readouterr().err
    folder.close()


def test_plain_values_only_in_one_of_both(tmp_path: Path) -> None:
    """Another torch version has other options in its param_groups: what is not saved stays, what is saved comes."""
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"g": [{"lr": 1.0, "old": True, "list": [1, 2, 3]}], "w": torch.ones(1)}, {}, {}, {})
    folder.wait()
    found = folder.find()
    assert found is not None
    state = {"g": [{"lr": 0.0, "new": "kept", "list": [0]}], "w": torch.zeros(1)}
    folder.load(found, state)
    assert state["g"] == [{"lr": 1.0, "new": "kept", "list": [1, 2, 3], "old": True}]
    folder.close()


def test_export_of_what_is_no_model(tmp_path: Path) -> None:
    for wrong in ({}, {"a": 1}, {"a": torch.ones(1), "b": [2]}):
        with pytest.raises(CheckpointError, match="no whole weights"):
            export(wrong, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        export({"a": torch.ones(1)}, tmp_path / "file" / "below")
    assert standing(tmp_path) == []
