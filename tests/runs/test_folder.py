"""The run folder and its name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from instep.errors import RunError
from instep.runs import create_folder, default_name

if TYPE_CHECKING:
    from pathlib import Path

WHEN = datetime(2026, 1, 31, 12, 5, 9)  # noqa: DTZ001


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("train", "train-20260131-120509"),
        ("my script (2)", "my-script-2-20260131-120509"),
        ("größe", "größe-20260131-120509"),
        ("..", "run-20260131-120509"),
        ("", "run-20260131-120509"),
    ],
)
def test_default_name(stem: str, name: str) -> None:
    assert default_name(stem, WHEN) == name


def test_a_folder_is_made(tmp_path: Path) -> None:
    folder = create_folder(tmp_path / "deep" / "runs", "one", "unused")
    assert folder == tmp_path / "deep" / "runs" / "one"
    assert (folder / "log").is_dir()


def test_two_that_start_together_get_two(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: create_folder(tmp_path, None, "train"), range(20)))
    assert {folder.name for folder in made} == {"train"} | {f"train-{number}" for number in range(2, 21)}


def test_a_given_name_is_never_taken_twice(tmp_path: Path) -> None:
    create_folder(tmp_path, "mine", "unused")
    with pytest.raises(RunError, match="there is a run named mine already"):
        create_folder(tmp_path, "mine", "unused")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\nb", "a\0b", "x" * 201])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot be the name of a run"):
        create_folder(tmp_path / "runs", name, "unused")
    assert not (tmp_path / "runs").exists()


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        create_folder(tmp_path / "file" / "runs", None, "x")
