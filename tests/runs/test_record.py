"""run.json, whole or not at all; and the state of the code."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from instep.runs import Outcome, RunRecord, git_facts

if TYPE_CHECKING:
    from pathlib import Path


def _record() -> RunRecord:
    return RunRecord(
        name="a", command=["instep", "run", "x.py"], script="x.py", arguments=[], cwd="/", hosts=["h"], world_size=2,
        device="cpu", threads=1, master="127.0.0.1:20000", job="a-1", pid=1,
    )  # fmt: skip


def test_written_and_read(tmp_path: Path) -> None:
    record = _record()
    record.write(tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["outcome"], found["end"], found["exit_code"]) == ("running", None, None)
    assert datetime.fromisoformat(found["start"]).tzinfo is not None
    record.outcome, record.exit_code, record.exit_codes = Outcome.FAILED, 1, {"0": 143, "1": 1}
    record.write(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["exit_codes"] == {"0": 143, "1": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        _record().write(tmp_path / "gone")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("ignored\n")
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(
            ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words],
            check=True,
        )
    return folder


def test_a_clean_repository(repository: Path) -> None:
    (repository / "ignored").touch()
    (repository / "runs").mkdir()
    (repository / "runs" / "old").touch()
    facts = git_facts(repository, exclude=repository / "runs")
    assert facts is not None
    assert (len(facts.commit), facts.branch, facts.dirty, facts.patch) == (40, "trunk", False, b"")


def test_a_changed_file_and_a_new_one(repository: Path) -> None:
    (repository / "train.py").write_text("x = 2\n")
    (repository / "new.py").touch()
    facts = git_facts(repository)
    assert facts is not None
    assert facts.dirty
    assert facts.untracked == ("new.py",)
    assert b"-x = 1\n+x = 2\n" in facts.patch
    assert "patch" not in facts.as_json()


def test_no_commit_yet(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a.py").touch()
    facts = git_facts(tmp_path)
    assert facts is not None
    assert (facts.commit, facts.dirty, facts.untracked) == ("", True, ("a.py",))


def test_no_repository(tmp_path: Path) -> None:
    assert git_facts(tmp_path) is None
