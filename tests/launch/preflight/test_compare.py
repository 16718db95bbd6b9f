"""What machines have said -> nothing, notes, or one table of what is not alike."""

from __future__ import annotations

from typing import Any

import pytest

from instep.errors import RunError
from instep.launch.preflight.compare import Answer, check

A, B, C = "a" * 64, "b" * 64, "c" * 64


def facts(number: int = 0, **changed: Any) -> dict[str, Any]:
    return {
        "host": f"n{number}",
        "identity": f"boot/net/n{number}",
        "user": "anna",
        "python": "3.11.2",
        "executable": "/venv/bin/python",
        "torch": "2.13.0",
        "instep": "0.1.0",
        "numpy": "2.1.0",
        "instep_at": "/venv/lib/instep",
        "instep_hash": A,
        "cwd": {"path": "/code", "there": True, "writable": True},
        "script": {"path": "/code/train.py", "hash": B, "why": ""},
        "code": None,
        "free_bytes": 1 << 40,
        "shared": None,
        "interfaces": [["lo", "127.0.0.1", 8], ["eth0", f"10.0.0.{number}", 24]],
        "machine": [f"n{number}", 8, 0, [20_000, 29_499], [32_768, 60_999]],
        "limits": {"memlock": -1, "nofile": 1 << 20},
        "clock": 1000.0,
        **changed,
    }


def answers(*changes: dict[str, Any], folder: dict[int, str] | None = None) -> list[Answer]:
    """Machines n1, n2, ... with these differences."""
    return [
        Answer(f"n{number}", facts(number, **change), 999.9, 1000.1, (folder or {}).get(number, ""))
        for number, change in enumerate(changes, 1)
    ]


def error(*changes: dict[str, Any], folder: dict[int, str] | None = None, own_copies: bool = False) -> RunError:
    with pytest.raises(RunError) as caught:
        check(answers(*changes, folder=folder), facts(), own_copies=own_copies)
    return caught.value


def test_alike() -> None:
    assert check(answers({}, {}, {}), facts()) == []
    assert check(answers({}, {}), facts(python="3.13.1", torch=None)) == []  # the launcher runs no rank
    assert check(answers({"torch": None}, {"torch": None}), facts()) == []


MISSING = {"script": {"path": "/code/train.py", "hash": None, "why": "missing"}}
NO_FOLDER = {"cwd": {"path": "/code", "there": False, "writable": False}}


@pytest.mark.parametrize(
    ("change", "folder", "row", "cure"),
    [
        (
            {"python": "3.13.1", "executable": "/usr/bin/python3"},
            "",
            "python  3.11.2 /venv/bin/python  3.13.1 /usr/bin/python3 ✗  3.11.2 /venv/bin/python",
            "on n2: make an environment with Python 3.11, at one path for all, and name it:  --python PATH",
        ),
        (
            {"torch": "2.12.0"},
            "",
            "torch  2.13.0  2.12.0 ✗  2.13.0",
            "on n2:  /venv/bin/python -m pip install torch==2.13.0",
        ),
        (
            {"torch": None},
            "",
            "torch  2.13.0  not installed ✗  2.13.0",
            "on n2:  /venv/bin/python -m pip install torch==2.13.0",
        ),
        (
            {"torch": "2.13.0+cpu"},
            "",
            "torch  2.13.0  2.13.0+cpu ✗  2.13.0",
            "on n2:  /venv/bin/python -m pip install torch==2.13.0",
        ),
        (
            MISSING,
            "",
            "script  bbbbbbbb  missing ✗  bbbbbbbb",
            "on n2 there is no /code/train.py\nrun in a folder that all",
        ),
        (
            {"script": {"path": "/code/train.py", "hash": C, "why": ""}},
            "",
            "script  bbbbbbbb  cccccccc ✗  bbbbbbbb",
            "on n2 /code/train.py is another one than here (bbbbbbbb)",
        ),
        (
            NO_FOLDER,
            "",
            "folder  there  missing ✗  there",
            "on n2 there is no /code\nrun in a folder that all machines share; or let instep copy the code:  --sync",
        ),
        ({}, "not shared", "runs folder  shared  not shared ✗  shared", "--own-copies"),
        (
            {},
            "not writable: Permission denied",
            "runs folder  shared  not writable: Permission denied ✗  shared",
            "run in a folder that all machines share",
        ),
        ({"clock": 1100.0}, "", "clock  +0 s  +100 s ✗  +0 s", "set the clock of n2"),
        ({"clock": 900.0}, "", "clock  +0 s  -100 s ✗  +0 s", "chrony"),
    ],
)
def test_one_machine_differs(change: dict[str, Any], folder: str, row: str, cure: str) -> None:
    found = error({}, change, {}, folder={2: folder})
    assert found.what == "the machines are not alike"
    head, line = found.evidence
    assert head.split() == ["n1", "n2", "n3"]
    assert " ".join(line.split()) == " ".join(row.split())
    assert cure in found.cure


def test_another_instep() -> None:
    found = error({}, {"instep": "0.2.0", "instep_hash": C})
    assert "0.2.0 (cccccccc)" in found.evidence[1]
    assert "pip install instep==0.1.0" in found.cure
    same_version = error({}, {"instep_hash": C})
    assert "the same version with other contents: bring there what is here, in /venv/lib/instep" in same_version.cure


def test_all_differences_in_one_table() -> None:
    found = error({}, {"torch": "2.12.0", **MISSING}, {"torch": "2.12.0"}, {}, folder={4: "not shared"})
    assert found.evidence == (
        "             n1        n2         n3        n4",
        "torch        2.13.0    2.12.0 ✗   2.12.0 ✗  2.13.0",
        "script       bbbbbbbb  missing ✗  bbbbbbbb  bbbbbbbb",
        "runs folder  shared    shared     shared    not shared ✗",
    )
    assert len(found.cure.splitlines()) == 4, found.cure


def test_of_two_and_two_the_first_is_right() -> None:
    found = error({"torch": "1.0"}, {"torch": "2.0"})
    assert found.evidence[1].split() == ["torch", "1.0", "2.0", "✗"]


def test_many_machines_have_a_line_each() -> None:
    changes: list[dict[str, Any]] = [{} for _ in range(20)]
    changes[6] = {"torch": "2.12.0"}
    changes[11] = MISSING
    found = error(*changes)
    assert [line.split() for line in found.evidence] == [
        ["torch", "script"],
        ["n1", "and", "17", "more", "2.13.0", "bbbbbbbb"],
        ["n7", "2.12.0", "✗", "bbbbbbbb"],
        ["n12", "2.13.0", "missing", "✗"],
    ]


def test_one_machine_under_two_names() -> None:
    with pytest.raises(RunError, match="n1 and n2 are the same machine") as caught:
        check(answers({}, {"identity": "boot/net/n1"}), facts())
    assert "--hosts n1:N" in caught.value.cure
    assert caught.value.evidence == ("both say: host name n2, 10.0.0.2",)


def test_own_copies() -> None:
    """The folder need not be shared then, but all its Python files have to be those of here."""
    code = {"train.py": B, "model.py": C}
    here = facts(code=code)
    assert check(answers({"code": code}, {"code": code}, folder={2: "not shared"}), here, own_copies=True) == []
    for other in ({"train.py": B, "model.py": A}, {"train.py": B}, {**code, "model.py": None}):
        with pytest.raises(RunError) as caught:
            check(answers({"code": code}, {"code": other}, {"code": code}), here, own_copies=True)
        assert caught.value.evidence[1].split() == ["code", "as", "here", "1", "differ", "✗", "as", "here"]
        assert "on n2 these files are others than here: model.py" in caught.value.cure
    many = {f"f{n}.py": A for n in range(8)}
    with pytest.raises(RunError) as caught:
        check(answers({"code": many}, {"code": many}), here, own_copies=True)
    assert "f0.py, f1.py, f2.py, f3.py, f4.py and 5 more" in caught.value.cure


def test_what_will_be_copied_does_not_matter_yet() -> None:
    differing = answers({}, {**MISSING, **NO_FOLDER, "code": {}})
    assert check(differing, facts(), own_copies=True, to_be_copied=True) == []
    with pytest.raises(RunError, match="not alike"):
        check(answers({}, {"torch": "2.12.0"}), facts(), own_copies=True, to_be_copied=True)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"clock": 1005.0}, "the clock of n2 is +4.9 s off"),
        ({"clock": 995.0}, "the clock of n2 is -4.9 s off"),
        ({"numpy": "1.26.4"}, "numpy differs: n1 2.1.0, n2 1.26.4"),
        ({"python": "3.11.9"}, "python differs: n1 3.11.2, n2 3.11.9"),
        ({"user": "otto"}, "user differs: n1 anna, n2 otto"),
        ({"free_bytes": 5 << 20}, "little room for runs on n2: 5 MiB"),
        ({"limits": {"memlock": -1, "nofile": 1024}}, "limits on n2: at most 1024 open files (ulimit -Hn)"),
    ],
)
def test_what_does_not_hinder_is_noted(change: dict[str, Any], note: str) -> None:
    assert check(answers({}, change), facts()) == [note]


def test_locked_memory_matters_with_gpus() -> None:
    machine = {"machine": ["n2", 8, 4, [20_000, 29_499], [32_768, 60_999]]}
    limits = {"limits": {"memlock": 64 << 10, "nofile": 1 << 20}}
    assert check(answers({}, limits), facts()) == []
    (note,) = check(answers({}, {**limits, **machine}), facts())
    assert "64 KiB of locked memory" in note


@pytest.mark.parametrize(
    ("clock", "asked", "received", "skew"),
    [
        (1000.0, 999.0, 1001.0, 0.0),
        (1000.0, 990.0, 1010.0, 0.0),  # a slow answer says nothing of the clock
        (1050.0, 999.0, 1001.0, 49.0),
        (950.0, 999.0, 1001.0, -49.0),
    ],
)
def test_only_what_is_certain_of_a_clock(clock: float, asked: float, received: float, skew: float) -> None:
    assert Answer("n1", facts(clock=clock), asked, received).skew == skew
