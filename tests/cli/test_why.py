"""`instep why`: what stands in the run folder, told again; flight-recorder dumps; mistakes, each one clear error."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from instep.guard import report
from instep.guard.verdicts import LeftAt, Verdict, Waiting
from tests.commands import Result, run_command

if TYPE_CHECKING:
    from collections.abc import Callable

INSTEP = str(Path(sys.executable).with_name("instep"))
VERDICT = Verdict(
    kind="missing",
    proven=True,
    ranks=(1,),
    left_at=LeftAt("/elsewhere/train.py", 41, "main", "if bad: continue"),
    values={0: "False", 1: "True"},
    waiting=(Waiting(0, "all_reduce", 3, (4,), "Float", "0", "/elsewhere/train.py", 43, "loss.backward()"),),
    reason="rank 1 skips the step",
)
RECORD = {"outcome": "out of step", "exit_code": 86, "seconds": 4.2, "pid": 1, "first_failure": None}


def _why(folder: Path, *words: object) -> Result:
    return run_command([INSTEP, "why", *map(str, words)], limit_s=20, cwd=folder)


def _run(folder: Path, **files: Any) -> Path:
    run = folder / "runs" / "train-1"
    run.mkdir(parents=True)
    for name, value in files.items():
        (run / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return run


def _entry(index: int, kind: str, file: Path, line: int, *, size: int = 4, active: bool = False) -> dict[str, Any]:
    """As torch 2.13 writes it."""
    return {
        "record_id": index, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": index,
        "p2p_seq_id": 0, "op_id": index, "profiling_name": f"gloo:{kind}", "time_created_ns": 10**18 + index,
        "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size]], "output_dtypes": ["Float"],
        "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": not active, "timeout_ms": 1800000, "is_p2p": False, "thread_id": "1", "thread_name": "python",
        "frames": [
            {"name": kind, "filename": "/lib/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
            {"name": "<module>", "filename": str(file), "line": line},
        ],
    }  # fmt: skip


def _dump(entries: list[dict[str, Any]]) -> bytes:
    return pickle.dumps({"version": "2.10", "pg_config": {"": {"ranks": "[]"}}, "pg_status": {}, "entries": entries})


def test_the_verdict_is_told_again(tmp_path: Path) -> None:
    desync = report.as_json(VERDICT, 1.4)
    _run(tmp_path, desync=desync, run=RECORD)
    for name in ("train-1", "runs/train-1", "runs/train-1/", "runs/train-1/desync.json"):
        said = _why(tmp_path, name).ok().out
        assert said.startswith("✗ ranks out of step — 1.4 s after it happened\n  rank 1 left the common path at ")
        assert said.endswith("  out of step after 4.2 s (exit code 86)\n")
    assert json.loads(_why(tmp_path, "train-1", "--json").ok().out) == json.loads(json.dumps(desync))


def test_a_run_that_was_in_step(tmp_path: Path) -> None:
    event = {
        "rank": 1,
        "time": 1.0,
        "exit_code": 1,
        "signal": 0,
        "type": "ValueError",
        "message": "bad",
        "traceback": "",
    }
    record = {**RECORD, "outcome": "failed", "exit_code": 1, "first_failure": {"host": "vm", **event}}
    _run(tmp_path, run=record)
    said = _why(tmp_path, "train-1").ok().out
    assert "no ranks out of step were seen in train-1\n  failed after 4.2 s (exit code 1)\n" in said
    assert "rank 1 on vm failed: ValueError: bad" in said
    values = json.loads(_why(tmp_path, "train-1", "--json").ok().out)
    assert (values["kind"], values["outcome"], values["first_failure"]["rank"]) == (None, "failed", 1)


@pytest.mark.parametrize("name", ["nccl_trace_rank_{}", "rank-{}.pkl", "dump{}"])
def test_dumps_of_a_job_that_instep_did_not_start(tmp_path: Path, name: str) -> None:
    train = tmp_path / "train.py"
    train.write_text("import x\nfor step in steps:\n    dist.all_reduce(loss)\n    if bad:\n        dist.barrier()\n")
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank in range(3):
        last = (
            _entry(3, "broadcast", train, 5, active=True)
            if rank == 1
            else _entry(3, "all_reduce", train, 3, active=True)
        )
        healthy = [_entry(index, "all_reduce", train, 3) for index in (1, 2)]
        (folder / name.format(rank)).write_bytes(_dump([*healthy, last]))
    values = json.loads(_why(tmp_path, "dumps", "--json").ok().out)
    assert (values["kind"], values["ranks"]) == ("mismatch", [1])
    assert {one["rank"]: (one["op"], one["line"]) for one in values["waiting"]} == {
        0: ("all_reduce", 3),
        1: ("broadcast", 5),
        2: ("all_reduce", 3),
    }
    assert "rank 1" in _why(tmp_path, "dumps").ok().out


def test_dumps_that_agree(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(_dump([_entry(1, "all_reduce", tmp_path / "t.py", 3)]))
    assert "do not say that they are out of step" in _why(tmp_path, ".").ok().out


class _Malice:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return subprocess.check_call, (["touch", "pwned"],)


def _empty_folder(folder: Path) -> str:
    (folder / "empty").mkdir()
    return "empty"


def _cut(folder: Path) -> str:
    _run(folder, desync=json.dumps(report.as_json(VERDICT, 1.0))[:100])
    return "train-1"


def _other_object(folder: Path) -> str:
    _run(folder, desync={"kind": "mismatch"})
    return "train-1"


def _list(folder: Path) -> str:
    _run(folder, run="[1, 2]")
    return "train-1"


def _file(folder: Path) -> str:
    (folder / "train.py").write_text("")
    return "train.py"


def _near(folder: Path) -> str:
    _run(folder, run=RECORD)
    return "trian-1"


def _dumps_of(*contents: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        for rank, content in enumerate(contents):
            (folder / f"rank_{rank}").write_bytes(content)
        return "."

    return make


def _twice(folder: Path) -> str:
    for name in ("old_rank_0", "new_rank_0", "rank_1"):
        (folder / name).write_bytes(_dump([]))
    return "."


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: "nothing", ["no such run: 'nothing'", "→ name the folder of a run"]),
        (lambda _: "", ["no such run: ''"]),
        (_near, ["no such run: 'trian-1'", "→ did you mean:  instep why runs/train-1"]),
        (_file, ["train.py is a file, and no run", "→ the folder that it lies in"]),
        (_empty_folder, ["empty is neither a run nor a folder of dumps"]),
        (_cut, ["desync.json is not what instep writes", "was it changed, or cut short?"]),
        (_other_object, ["desync.json is not what instep writes", "KeyError"]),
        (_list, ["run.json is not what instep writes", "it holds a list"]),
        (_dumps_of(_dump([])), ["holds no dumps of several ranks", "one dump alone: rank_0"]),
        (_dumps_of(b"", b""), ["rank_0 is no dump of the flight recorder", "0 bytes"]),
        (_dumps_of(b'{"entries": []}', b"{}"), ["rank_0 is no dump", "it is JSON, which has no stacks"]),
        (_dumps_of(_dump([]), pickle.dumps([1])), ["rank_1 is no dump", "it holds a list"]),
        (_dumps_of(_dump([]), pickle.dumps({"a": 1})), ["rank_1 is no dump", "a dict without entries: a"]),
        (_dumps_of(_dump([]), pickle.dumps(_Malice())), ["rank_1 is no dump", "subprocess.check_call"]),
        (_dumps_of(_dump([]), _dump([{"a": 1}])), ["the entries of rank_1 are not those", "version 2.10"]),
        (_twice, ["two files for rank 0", "old_rank_0"]),
    ],
)
def test_mistakes(tmp_path: Path, make: Callable[[Path], str], said: list[str]) -> None:
    result = _why(tmp_path, make(tmp_path))
    assert result.rc == 2, str(result)
    assert "Traceback" not in result.err
    assert all(text in result.err for text in said), str(result)
    assert result.err.startswith("✗ ")
    assert result.out == ""
    assert not (tmp_path / "pwned").exists()


def test_a_mistake_as_json(tmp_path: Path) -> None:
    result = _why(tmp_path, _dumps_of(b"", b"")(tmp_path), "--json")
    assert result.rc == 2, str(result)
    assert "rank_0 is no dump" in json.loads(result.out)["error"]["what"]
