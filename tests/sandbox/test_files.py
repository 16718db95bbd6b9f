"""The texts that a sandbox is made of, as tables."""

from __future__ import annotations

import dataclasses

import pytest

from instep.errors import RunError
from instep.sandbox import files, image, network, state, views, vms
from instep.sandbox.state import Machine, Sandbox, User

ROOT = User("root", 0, 0, "root", "/root")
ANNA = User("anna", 1000, 1001, "lab", "/home/anna")
SECRETS = files.Secrets(
    "PRIVATE\n",
    "ssh-ed25519 AAAA user\n",
    {f"n{number}": (f"HOST{number}\n", f"ssh-ed25519 KEY{number} root@n{number}\n") for number in (1, 2)},
    "secret",
)
TABLES = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nmunge:x:101:102::/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nshadow:x:42:\nmunge:x:102:\n",
    "/etc/shadow": "root:*:19000:0:99999:7:::\n",
}


def sandbox(**changes: object) -> Sandbox:
    machines = [Machine(f"n{number}", f"10.77.4.{number}", str(number) * 32) for number in (1, 2)]
    made = Sandbox("lab", "containers", "bookworm", "bookworm-0", 4, machines, ROOT, "instep sandbox up", "boot")
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_inventory() -> None:
    assert files.inventory(sandbox()) == (
        "# made by: instep sandbox up\n"
        'ssh_config = "/var/lib/instep/sandbox/lab/ssh_config"\n'
        'head = "n1"  # where mpirun, srun and sbatch are started\n'
        '\n[[machines]]\nname = "n1"\naddress = "10.77.4.1"\nslots = 2\n'
        '\n[[machines]]\nname = "n2"\naddress = "10.77.4.2"\nslots = 2\n'
    )


def test_ssh_config() -> None:
    assert files.ssh_config(sandbox(user=ANNA)).split("\n\n")[1] == (
        "Host n2\n"
        "    HostName 10.77.4.2\n"
        "    User anna\n"
        '    IdentityFile "/var/lib/instep/sandbox/lab/id_ed25519"\n'
        "    IdentitiesOnly yes\n"
        '    UserKnownHostsFile "/var/lib/instep/sandbox/lab/known_hosts"\n'
        "    StrictHostKeyChecking yes\n"
        "    LogLevel ERROR\n"
        "    ConnectTimeout 10\n"
    )


def test_known_hosts() -> None:
    text = files.known_hosts(sandbox().machines, SECRETS)
    assert text == "n1,10.77.4.1 ssh-ed25519 KEY1\nn2,10.77.4.2 ssh-ed25519 KEY2\n"


@pytest.mark.parametrize(
    ("loopback", "own", "other"),
    [(False, "10.77.4.2 n2", "10.77.4.1 n1"), (True, "127.0.1.1 n2", "10.77.4.1 n1")],
)
def test_hosts(loopback: bool, own: str, other: str) -> None:
    made = sandbox(loopback_names=loopback)
    assert files.hosts(made, made.machines[1]).splitlines()[2:] == [other, own]


def test_slurm_conf() -> None:
    lines = files.slurm_conf(sandbox(), 4000).splitlines()
    assert "SlurmctldHost=n1(10.77.4.1)" in lines
    assert "NodeName=n2 NodeAddr=10.77.4.2 CPUs=4 RealMemory=4000 State=UNKNOWN" in lines
    assert [line.split()[0] for line in lines if line.startswith("Partition")] == [
        "PartitionName=train",
        "PartitionName=urgent",
    ]


@pytest.mark.parametrize(("release", "plugin"), [("bookworm", "cgroup/v1"), ("trixie", "disabled")])
def test_cgroup_conf(release: str, plugin: str) -> None:
    assert files.cgroup_conf(release) == f"CgroupPlugin={plugin}\n"


def test_the_user_of_a_machine() -> None:
    made = files.machine(sandbox(user=ANNA), sandbox().machines[0], SECRETS, TABLES, 4000)
    assert made["/etc/passwd"].text.splitlines()[-1] == "anna:x:1000:1001::/home/anna:/bin/bash"
    assert made["/etc/group"].text.splitlines()[-1] == "lab:x:1001:"
    assert (made["/etc/shadow"].mode, made["/etc/shadow"].gid) == (0o640, 42)
    own = made["/etc/ssh/instep/anna"]
    assert (own.text, own.mode, own.uid, own.gid) == ("PRIVATE\n", 0o600, 1000, 1001)


def test_a_user_whom_the_image_has_already() -> None:
    tables = TABLES | {"/etc/passwd": f"{TABLES['/etc/passwd']}anna:x:5:5::/var:/bin/false\n"}
    made = files.accounts(sandbox(user=ANNA), tables)
    assert [line for line in made["/etc/passwd"].text.splitlines() if line.startswith("anna:")] == [
        "anna:x:1000:1001::/home/anna:/bin/bash"
    ]


def test_root_needs_no_account() -> None:
    assert "/etc/passwd" not in files.machine(sandbox(), sandbox().machines[0], SECRETS, TABLES, 4000)


def test_secrets_of_a_machine_are_closed() -> None:
    made = files.machine(sandbox(user=ANNA), sandbox().machines[0], SECRETS, TABLES, 4000)
    secret = {"PRIVATE\n", "HOST1\n", "secret"}
    assert {file.mode & 0o077 for file in made.values() if file.text in secret} == {0}
    assert sum(file.text in secret for file in made.values()) == 4
    assert (made["/etc/munge/munge.key"].uid, made["/etc/munge/munge.key"].gid) == (101, 102)


@pytest.mark.parametrize(
    ("number", "slurm", "units"),
    [(0, True, {"munge", "slurmd", "slurmctld"}), (1, True, {"munge", "slurmd"}), (0, False, set())],
)
def test_units_that_start(number: int, slurm: bool, units: set[str]) -> None:
    made = sandbox(slurm=slurm)
    laid = files.machine(made, made.machines[number], SECRETS, TABLES, 4000)
    assert {path.rpartition("/")[2].removesuffix(".service") for path, file in laid.items() if file.link} == units


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a b", "../a", "a" * 21, "a-", "ä", "-a", "a/b"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(RunError, match="cannot be the name"):
        state.check_name(name)


@pytest.mark.parametrize("name", ["a", "sandbox", "my-lab-2", "a" * 20, "abcdef-ghijklm-nop"])
def test_names_of_interfaces_are_short_enough(name: str) -> None:
    assert len(state.link_name(state.check_name(name))) <= 15


def test_long_names_of_interfaces_differ() -> None:
    assert len({state.link_name("a" * length) for length in range(1, 21)}) == 20


@pytest.mark.parametrize("rate", ["100mbit", "1gbit", "512kbit"])
def test_rates(rate: str) -> None:
    assert network.check_rate(rate) == rate


@pytest.mark.parametrize("rate", ["100", "fast", "-1mbit", "0mbit", "100mbit; reboot", "100 mbit", "1e3mbit"])
def test_rates_that_cannot_be(rate: str) -> None:
    with pytest.raises(RunError, match="is not a rate"):
        network.check_rate(rate)


@pytest.mark.parametrize(
    ("rw", "ro", "shown"),
    [
        (["/code"], ["/code/.venv", "/code/src"], [("/code", "rw")]),
        (["/code/a"], ["/code"], [("/code", "ro"), ("/code/a", "rw")]),
        (["/code"], ["/code"], [("/code", "rw")]),
        (["/code", "/codeshop"], [], [("/code", "rw"), ("/codeshop", "rw")]),
        ([], ["/opt/py", "/opt/py/lib"], [("/opt/py", "ro")]),
        (["/a/b/c"], ["/a", "/a/b"], [("/a", "ro"), ("/a/b/c", "rw")]),
    ],
)
def test_what_machines_see(rw: list[str], ro: list[str], shown: list[tuple[str, str]]) -> None:
    assert views.collapse(rw, ro) == shown


@pytest.mark.parametrize("path", ["/", "/usr", "/etc", "/etc/ssh", "/proc", "/var", "/dev/shm"])
def test_folders_that_a_machine_has_itself(path: str) -> None:
    with pytest.raises(RunError, match="each machine's own"):
        views.check_share(path)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(RunError, match="no such folder"):
        views.check_share("/no/such/folder")


DEBIAN = "http://mirror.example/debian|bookworm|main\n"
MORE = """\
http://mirror.example/debian|bookworm|contrib
http://mirror.example/debian|bookworm-updates|main
https://sec.example/s|bookworm-security|main
https://other.example/x|nodistro|main
"""


@pytest.mark.parametrize(
    ("targets", "release", "lines"),
    [
        (DEBIAN, "trixie", ["deb http://mirror.example/debian trixie main"]),
        (
            DEBIAN * 2 + MORE,
            "bookworm",
            [
                "deb http://mirror.example/debian bookworm main",
                "deb http://mirror.example/debian bookworm-updates main",
                "deb https://sec.example/s bookworm-security main",
            ],
        ),
        (
            "http://mirror.example/debian|stable|main\n",
            "bookworm",
            ["deb http://mirror.example/debian bookworm main"],
        ),
    ],
)
def test_where_a_release_comes_from(targets: str, release: str, lines: list[str]) -> None:
    assert image.sources(release, targets) == ("http://mirror.example/debian", lines)


@pytest.mark.parametrize("targets", ["", "http://archive.example/ubuntu|noble|main\n"])
def test_a_host_that_knows_no_debian(targets: str) -> None:
    with pytest.raises(RunError, match="not known") as caught:
        image.sources("bookworm", targets)
    assert "--mirror" in caught.value.cure


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ('ID=debian\nVERSION_CODENAME=trixie\nPRETTY_NAME="Debian"\n', "trixie"),
        ('ID="debian"\nVERSION_CODENAME="bookworm"\n', "bookworm"),
        ("ID=ubuntu\nVERSION_CODENAME=noble\n", ""),
        ("", ""),
    ],
)
def test_own_release(text: str, own: str) -> None:
    assert image.own_release(text) == own


@pytest.mark.parametrize(
    ("own", "libc", "release"),
    [
        ("trixie", "2.41", "trixie"),
        ("bookworm", "2.36", "bookworm"),
        ("", "2.39", "trixie"),  # Ubuntu 24.04: its Python does not run on bookworm
        ("", "2.35", "bookworm"),
        ("", "", "bookworm"),
        ("sid", "2.42", "trixie"),
    ],
)
def test_default_release(own: str, libc: str, release: str) -> None:
    assert image.default_release(own, ("glibc", libc)) == release


def test_an_image_is_another_when_its_recipe_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = image.identity("bookworm")
    assert before.startswith("bookworm-")
    monkeypatch.setattr(image, "PACKAGES", (*image.PACKAGES, "hello"))
    assert image.identity("bookworm") != before


def test_what_a_virtual_machine_has_besides() -> None:
    made = sandbox(kind="vms", docker=True, rate="10mbit", disk="50m", mounts=[("/work dir", "rw"), ("/opt", "ro")])
    laid = vms.files(made, made.machines[1])
    assert laid["/etc/fstab"].text == (
        "folder0 /shared virtiofs rw,nofail 0 0\n"
        "folder1 /var/lib/instep/sandbox/lab/shared virtiofs rw,nofail 0 0\n"
        "folder2 /work\\040dir virtiofs rw,nofail 0 0\n"
        "folder3 /opt virtiofs ro,nofail 0 0\n"
        "tmpfs /scratch tmpfs size=50m,mode=1777 0 0\n"
    )
    assert "Address=10.77.4.2/24" in laid["/etc/systemd/network/eth0.network"].text
    assert "Address=172.17.0.1/16" in laid["/etc/systemd/network/docker0.network"].text
    assert "Rate=10M\n" in laid["/etc/systemd/network/eth0.network"].text
    bare = vms.files(sandbox(kind="vms"), sandbox().machines[0])
    assert not [path for path in bare if "docker" in path]
    assert "Rate" not in bare["/etc/systemd/network/eth0.network"].text


def test_python_of_another_release() -> None:
    laid = files.machine(sandbox(python="python3.11"), sandbox().machines[0], SECRETS, TABLES, 4000)
    assert laid["/usr/bin/python3"].link == "python3.11"
    assert "/usr/bin/python3" not in files.machine(sandbox(), sandbox().machines[0], SECRETS, TABLES, 4000)
