"""What ssh is called with, what its words mean, and which variables go to another machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from instep.errors import RunError
from instep.launch.agents.ssh import Way, environment, explain, is_here
from instep.world.hosts import Host

WAY = Way(Path("/etc/cluster/ssh config"), "/opt/env/bin/python")


def test_the_command() -> None:
    words = WAY.agent(Host("me@n1"), "train-1234")
    assert words[:3] == ["ssh", "-F", "/etc/cluster/ssh config"]
    assert words[-3:] == [
        "--", "me@n1",
        "cd / && exec env INSTEP_JOB=train-1234 /opt/env/bin/python -m instep.launch.agents.agent",
    ]  # fmt: skip
    assert "BatchMode=yes" in words
    assert not any("StrictHostKeyChecking" in word or "UserKnownHostsFile" in word for word in words)
    # An address is where the other machines reach it, which may be another network than the launcher's.
    assert not any("10.0.0.7" in word for word in WAY.agent(Host("n1", address="10.0.0.7"), "m"))


@pytest.mark.parametrize(
    ("status", "words", "what", "cure"),
    [
        (255, "ssh: Could not resolve hostname n9: Name or service not known", "there is no machine named n1", "HostName ADDRESS"),
        (255, "Host key verification failed.", "the host key of n1 is not known here", "compare the fingerprint"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "is not the one that is known", "ssh-keygen -R n1"),
        (255, "root@n1: Permission denied (publickey).", "n1 does not let you in without a password", "ssh-copy-id n1"),
        (255, "ssh: connect to host n1 port 22: Connection refused", "n1 refuses connections of ssh", "systemctl status ssh"),
        (255, "ssh: connect to host n1 port 22: Connection timed out", "n1 does not answer", "ping n1"),
        (1, "/opt/env/bin/python: Error while finding module specification for 'instep.launch.agents.agent' (ModuleNotFoundError: No module named 'instep')", "the Python on n1 has no instep", "pip install instep"),
        (127, "env: '/opt/env/bin/python': No such file or directory", "there is no /opt/env/bin/python on n1", "--python PATH"),
        (126, "env: '/opt/env/bin/python': Permission denied", "cannot be started", "ls -l"),
        (255, "kex_exchange_identification: read: Connection reset by peer", "n1, or the gate before it, hangs up", "MaxStartups"),
        (255, "Bad configuration option: nonsense", "no agent could be started on n1", "ssh -F '/etc/cluster/ssh config' n1 true"),
        (None, "", "n1 has not answered in time", "n1 true"),
    ],
)  # fmt: skip
def test_what_went_wrong(status: int | None, words: str, what: str, cure: str) -> None:
    error = explain("n1", status, words.splitlines(), WAY)
    assert what in error.what
    assert cure in error.cure
    assert "StrictHostKeyChecking" not in error.cure
    for line in words.splitlines()[-1:]:
        assert any(line.removeprefix("ssh: ") in shown for shown in error.evidence)


def test_variables_that_go_along() -> None:
    launcher = {
        "PATH": "/opt/env/bin:/usr/bin", "PYTHONPATH": "/src", "NCCL_DEBUG": "INFO", "MY_TOKEN": "s3cret", "HOME": "/home/me",
        "SSH_AUTH_SOCK": "/tmp/agent", "XDG_RUNTIME_DIR": "/run/user/1", "SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "1", "INSTEP_RUN": "/runs/x", "RANK": "3", "TERM": "xterm", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    assert environment(launcher, []) == {
        "PATH": "/opt/env/bin:/usr/bin", "PYTHONPATH": "/src", "NCCL_DEBUG": "INFO", "MY_TOKEN": "s3cret", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    more = environment(launcher, ["CUDA_VISIBLE_DEVICES", "A=b=c", "EMPTY=", "PATH=/bin"])
    assert (more["CUDA_VISIBLE_DEVICES"], more["A"], more["EMPTY"], more["PATH"]) == ("1", "b=c", "", "/bin")


@pytest.mark.parametrize(
    ("given", "what"), [("NOT_THERE", "it is not set here"), ("1A=x", "names no variable"), ("=x", "names no variable")]
)
def test_variables_that_are_none(given: str, what: str) -> None:
    with pytest.raises(RunError, match=what):
        environment({}, [given])


@pytest.mark.parametrize(
    ("host", "here"),
    [
        (Host("localhost"), True),
        (Host("127.0.0.1"), True),
        (Host("::1"), True),
        (Host(socket.gethostname()), True),
        (Host("n1", address="127.0.0.1"), True),
        (Host("192.0.2.7"), False),
        (Host("localhost", address="192.0.2.7"), False),
        (Host("nobody-here@localhost"), False),
        (Host("no-such-machine"), False),
    ],
)
def test_this_machine(host: Host, here: bool) -> None:
    assert is_here(host) == here
