"""What cannot be is said in a sentence, with what to type instead; nothing is made."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests import needs
from tests.cluster.machines import INSTEP
from tests.commands import run_command
from tests.sandbox.traces import traces

NAME = "never"


@pytest.mark.parametrize(
    ("words", "what", "cure"),
    [
        (["--nodes", "0"], "--nodes 0 cannot be", "from 1 to 50"),
        (["--nodes", "999"], "--nodes 999 cannot be", "from 1 to 50"),
        (["--release", "potato"], "--release potato is not known", "bookworm, trixie"),
        (["--as", "pods"], "--as pods is not known", "containers, vms"),
        (["--net", "fast"], "--net fast is not a rate", "100mbit"),
        (["--disk", "much"], "--disk much is not a size", "500mb"),
        (["--share", "/no/such"], "--share /no/such: there is no such folder", ""),
        (["--share", "/etc"], "--share /etc would lay", "--share DIR"),
        (["--name", "Not A Name"], "cannot be the name of a sandbox", "lower-case letters"),
    ],
)
def test_up(words: list[str], what: str, cure: str) -> None:
    done = run_command([INSTEP, "sandbox", "up", "--name", NAME, *words])
    assert done.rc == 2, done
    assert what in done.err
    assert cure in done.err
    assert "Traceback" not in done.err
    said = json.loads(run_command([INSTEP, "sandbox", "up", "--name", NAME, "--json", *words]).out)
    assert what in said["error"]["what"]


@pytest.mark.parametrize(
    "verb", [["cut", "n1"], ["heal", "n1"], ["kill", "n1"], ["start", "n1"], ["exec", "n1", "true"]]
)
def test_a_sandbox_that_is_not_there(verb: list[str]) -> None:
    needs.need_sandbox()
    done = run_command([INSTEP, "sandbox", verb[0], "--name", NAME, *verb[1:]])
    assert (done.rc, f"there is no sandbox {NAME}" in done.err) == (2, True), done


@pytest.mark.parametrize("words", [["ssh", "--name", NAME, "n1"], ["status", "--name", NAME]])
def test_what_needs_no_root_says_it_as_well(words: list[str]) -> None:
    done = run_command([INSTEP, "sandbox", *words])
    assert (done.rc, f"there is no sandbox {NAME}" in done.err) == (2, True), done


def test_down_of_what_is_not_there() -> None:
    needs.need_root()
    done = run_command([INSTEP, "sandbox", "down", "--name", NAME])
    assert (done.rc, f"there is no sandbox {NAME}" in done.err) == (2, True), done


def test_without_root() -> None:
    needs.need_namespaces()
    # In a user namespace of its own this user is nobody, and may read the same files.
    done = run_command(["unshare", "--user", INSTEP, "sandbox", "up", "--name", NAME])
    assert done.rc == 2, done
    assert "only root makes machines" in done.err
    assert f"→ sudo {INSTEP} sandbox up --name {NAME}" in done.err
    done = run_command(["unshare", "--user", INSTEP, "sandbox", "down", "--name", NAME])
    assert (done.rc, "sudo" in done.err) == (2, True)


def test_without_the_packages() -> None:
    done = run_command([sys.executable, INSTEP, "sandbox", "up", "--name", NAME], env={"PATH": "/nowhere"})
    assert done.rc == 2, done
    assert "systemd-nspawn" in done.err
    line = next(line for line in done.err.splitlines() if "apt-get install" in line)
    assert {"systemd-container", "debootstrap", "nftables", "openssh-client", "iproute2"} <= set(line.split())
    assert line.strip().startswith("→ apt-get") == (os.geteuid() == 0)


def test_nothing_was_made() -> None:
    needs.need_sandbox()
    assert traces(NAME) == []
