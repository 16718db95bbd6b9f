"""R18: late on a network, on one machine only; and torn, corrupt and foreign checkpoints, which are passed over."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

import instep
from instep.errors import CheckpointError
from instep.train.checkpoints import CheckpointFolder, files, manifest
from tests.harness import run_job, run_ranks
from tests.train.checkpoints.states import save, standing, state_of, step_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def nodes(tmp_path: Path, *, steps: list[int], second: list[int]) -> Path:
    """Two pretended machines with a folder each: node0 and node1."""
    folder = CheckpointFolder(tmp_path / "node0", keep=10)
    for step in steps:
        save(folder, step)
    folder.close()
    (tmp_path / "node1").mkdir()
    for step in second:
        shutil.copytree(tmp_path / "node0" / f"step-{step}", tmp_path / "node1" / f"step-{step}")
    return tmp_path


def test_R18_appears_two_seconds_late(tmp_path: Path) -> None:
    root = nodes(tmp_path, steps=[3, 5], second=[3])

    def arrive() -> None:
        shutil.copytree(root / "node0" / "step-5", root / "node1" / "arriving")
        (root / "node1" / "arriving").rename(root / "node1" / "step-5")

    def work() -> Any:
        if instep.rank() == 1:
            threading.Timer(2.0, arrive).start()
        folder = CheckpointFolder(root / f"node{instep.rank()}")
        found = folder.find("latest")
        assert found is not None
        folder.load(found, state := state_of(0))
        folder.close()
        return found.step, step_in(state)

    assert run_ranks(work, 2) == [(5, 5.0)] * 2


def test_R18_half_of_it_appears_late(tmp_path: Path) -> None:
    root = nodes(tmp_path, steps=[5], second=[5])
    late = root / "node1" / "step-5" / ".metadata"
    whole = late.read_bytes()
    late.write_bytes(whole[:100])

    def work() -> Any:
        if instep.rank() == 1:
            threading.Timer(0.5, late.write_bytes, (whole,)).start()
        folder = CheckpointFolder(root / f"node{instep.rank()}")
        found = folder.find("latest")
        folder.close()
        return found and found.step

    assert run_ranks(work, 2) == [5, 5]


@pytest.mark.parametrize("second", [[], [3]])
def test_R18_on_one_node_only(tmp_path: Path, second: list[int]) -> None:
    root = nodes(tmp_path, steps=[3, 5], second=second)

    def work() -> Any:
        folder = CheckpointFolder(root / f"node{instep.rank()}", visible_within_s=0.3)
        try:
            folder.find("latest")
        except CheckpointError as error:
            return str(error)

    first, second_text = run_ranks(work, 2)
    assert first == second_text  # nobody goes on, nobody hangs
    assert f"rank 1 on {socket.gethostname()}" in first
    assert str(root / "node1" / "step-5") in first
    assert "0.3 s" in first


def test_R18_another_one_of_the_same_step(tmp_path: Path) -> None:
    root = nodes(tmp_path, steps=[5], second=[])
    folder = CheckpointFolder(root / "node1")
    save(folder, 4)
    save(folder, 5)
    folder.close()

    def work() -> Any:
        folder = CheckpointFolder(root / f"node{instep.rank()}", visible_within_s=0.1)
        with pytest.raises(CheckpointError, match="Not all ranks see") as caught:
            folder.find(5)
        return str(caught.value)

    assert "another checkpoint than the main rank's" in run_ranks(work, 2)[1]


def test_R18_only_the_other_node_has_one(tmp_path: Path) -> None:
    root = nodes(tmp_path, steps=[5], second=[])

    def work() -> Any:  # the main rank is the one without
        return CheckpointFolder(root / f"node{1 - instep.rank()}").find("latest")

    assert run_ranks(work, 2) == [None, None]


def test_R5_R18_a_folder_that_is_not_shared_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    def work() -> Any:
        folder = CheckpointFolder(tmp_path / f"node{instep.rank()}", visible_within_s=0.2)
        with pytest.raises(CheckpointError, match="Not all ranks see the folder") as caught:
            folder.save(1, state_of(1), {}, {}, {})
        folder.close()
        return str(caught.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert str(tmp_path / "node1") in first
    assert list((tmp_path / "node0").iterdir()) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def become_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("hello")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda p: (p / "__0_0.distcp").write_bytes(b"short"), "bytes, not"),
    "file missing": (lambda p: remove(p / "plain.pt"), "plain.pt is missing"),
    "corrupt tensors": (lambda p: flip(p / "__0_0.distcp"), "corrupt: its checksum does not fit"),
    "corrupt metadata": (lambda p: flip(p / ".metadata"), ".metadata is corrupt"),
    "no manifest": (lambda p: remove(p / "manifest.json"), "no manifest.json"),
    "torn manifest": (lambda p: (p / "manifest.json").write_text('{"format": "ins'), "no JSON"),
    "manifest of another program": (lambda p: (p / "manifest.json").write_text('{"step": 2}'), "of another program"),
    "manifest that is a list": (lambda p: (p / "manifest.json").write_text("[]"), "of another program"),
    "binary manifest": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "no JSON"),
    "newer format": (lambda p: edit(p, format_version=2), "format version 2"),
    "edited manifest": (lambda p: edit(p, epoch=7), "its own checksum does not fit"),
    "renamed": (lambda p: p.rename(p.with_name("step-9")), "it is of step 2, not of 9"),
    "empty folder": (lambda p: remove(*p.iterdir()), "no manifest.json"),
    "a file of that name": (become_file, "cannot be read"),
}


def edit(path: Path, **changes: Any) -> None:
    text = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(text))


@pytest.mark.parametrize("kind", DAMAGE)
def test_R15_R18_damage_is_named_and_passed_over(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    for step in (1, 2):
        save(folder, step)
    damage, words = DAMAGE[kind]
    damage(tmp_path / "step-2")
    found = folder.find("latest")
    assert found is not None
    assert found.step == 1
    warning = capsys.readouterr().err
    assert "passed over step-" in warning
    assert words in warning
    with pytest.raises(CheckpointError) as caught:
        folder.find(2)
    assert "step-1" in str(caught.value) or "not whole" in str(caught.value)
    folder.close()


def test_corruption_that_another_rank_finds(tmp_path: Path) -> None:
    def write() -> None:
        folder = CheckpointFolder(tmp_path)
        for step in (1, 2):
            save(folder, step)
        folder.close()

    def read() -> Any:
        folder = CheckpointFolder(tmp_path)
        found = folder.find("latest")
        folder.close()
        return found and found.step

    run_ranks(write, 2)
    names = sorted(json.loads((tmp_path / "step-2" / "manifest.json").read_text())["files"])
    flip(tmp_path / "step-2" / names[1])  # the second rank's share
    done = run_job(read, 2)
    assert done.values == [1, 1]
    assert "seen by rank 1" in done.outputs[0]


def test_a_file_that_goes_away_after_it_was_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    for name, words in (("__0_0.distcp", "not be read to its end"), ("plain.pt", "cannot be read")):
        found = folder.find("latest")
        assert found is not None
        (tmp_path / "step-1" / name).rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=words) as caught:
            folder.load(found, state_of(0))
        assert name in str(caught.value)
        (tmp_path / name).rename(tmp_path / "step-1" / name)
    folder.close()


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "none").find("latest") is None
    assert CheckpointFolder(tmp_path).find("best") is None


def test_a_pickle_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    import os
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    # Somebody who can also forge the checksums.
    path = tmp_path / "step-1"
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    text = json.loads((path / "manifest.json").read_text())
    size = (path / ".metadata").stat().st_size
    text["files"][".metadata"] = {"bytes": size, "crc32": f"{files.checksum(path / '.metadata'):08x}"}
    text["checksum"] = manifest._own_checksum(text)
    (path / "manifest.json").write_text(json.dumps(text))
    found = folder.find("latest")
    assert found is not None
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        folder.load(found, state_of(0))
    assert "mkdir" in str(caught.value)
    assert standing(tmp_path) == ["step-1"]
    assert not (tmp_path / "exploded").exists()
    folder.close()
