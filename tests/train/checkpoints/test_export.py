"""The final weights as a file for everybody."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from instep.errors import CheckpointError
from instep.train.checkpoints import export

if TYPE_CHECKING:
    from pathlib import Path


def tied_model() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    state = tied_model().state_dict() | {"turned": torch.arange(6.0).reshape(2, 3).t(), "none": torch.empty(0)}
    file = export(state, tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "model.safetensors"
    loaded = load_file(file)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["tied"]) == {"head.weight": "embed.weight"}
    assert [one.name for one in file.parent.iterdir()] == ["model.safetensors"]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    state = tied_model().state_dict()
    file = export(state, tmp_path)
    assert file.name == "model.pt"
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    with pytest.raises(CheckpointError, match="not installed") as caught:
        export(state, tmp_path / "x.safetensors")
    assert "instep[export]" in str(caught.value)


def test_the_suffix_decides(tmp_path: Path) -> None:
    assert torch.load(export({"w": torch.ones(2)}, tmp_path / "mine.pt"), weights_only=True)["w"].tolist() == [1, 1]
