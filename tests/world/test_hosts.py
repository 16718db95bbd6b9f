"""Host lists: what users write in three forms, and what each mistake is answered with."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ClusterShell.NodeSet import NodeSet  # type: ignore[import-untyped]
from hypothesis import given, settings, strategies as st

from instep.errors import RunError
from instep.world import hostnames, hosts
from instep.world.hosts import Host, HostList, parse_hosts, read_hostfile, read_inventory
from tests import needs
from tests.commands import run_command

if TYPE_CHECKING:
    from collections.abc import Callable

Slots = list[tuple[str, int | None]]


def said(found: HostList) -> Slots:
    return [(host.name, host.slots) for host in found.hosts]


def same(names: list[str], slots: int | None = None) -> Slots:
    return [(name, slots) for name in names]


def refused(read: Callable[[], HostList], *parts: str) -> str:
    with pytest.raises(RunError) as caught:
        read()
    assert caught.value.exit_code == 2
    assert caught.value.evidence
    assert caught.value.cure
    text = str(caught.value)
    assert all(part in text for part in parts), text
    return text


# ---- --hosts


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        ("h1", [("h1", None)]),
        ("h1:2,h2:2", [("h1", 2), ("h2", 2)]),
        ("h2,h1:3", [("h2", None), ("h1", 3)]),
        (" h1 ,\th2 ", same(["h1", "h2"])),
        ("user@h1", [("user@h1", None)]),
        ("user@n[1-2]:3", [("user@n1", 3), ("user@n2", 3)]),
        ("a.cluster.example,gpu_7,x-1.", same(["a.cluster.example", "gpu_7", "x-1."])),
        ("10.0.0.4:2", [("10.0.0.4", 2)]),
        ("10.0.0.[4-5]:2", [("10.0.0.4", 2), ("10.0.0.5", 2)]),
        ("[fe80::1]:2", [("fe80::1", 2)]),
        ("[::1]", [("::1", None)]),
        ("[2001:db8::7],h1", same(["2001:db8::7", "h1"])),
        ("me@[fe80::1%eth0]:4", [("me@fe80::1%eth0", 4)]),
        ("n[1-4]:8", same(["n1", "n2", "n3", "n4"], 8)),
        ("n[4,1-2]", same(["n4", "n1", "n2"])),
        ("b,n[9-11],a", same(["b", "n9", "n10", "n11", "a"])),
        ("n[08-10]", same(["n08", "n09", "n10"])),
        ("n[0-8/4]", same(["n0", "n4", "n8"])),
        ("n[7,00-04/2]", same(["n7", "n00", "n02", "n04"])),
        ("rack[0-1]node[1-2]-ib", same(["rack0node1-ib", "rack0node2-ib", "rack1node1-ib", "rack1node2-ib"])),
        ("r[1,0]n[0-2/2]", same(["r1n0", "r1n2", "r0n0", "r0n2"])),
        ("job-1234567890123456789", [("job-1234567890123456789", None)]),
    ],
)
def test_hosts(text: str, machines: Slots) -> None:
    found = parse_hosts(text)
    assert said(found) == machines
    assert {host.source for host in found.hosts} == {"--hosts"}
    assert (found.ssh_config, found.head) == (None, "")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["names no machine", "right: --hosts h1:2,h2:2"]),
        ("  ", ["names no machine"]),
        ("h1,,h2", ["Between two commas"]),
        ("h1,", ["Between two commas"]),
        (",", ["Between two commas"]),
        (":2", ["without a name"]),
        ("user@:2", ["without a name"]),
        ("h1:0", ["slots of h1", "'0'", "right: h1:2", "wrong: h1:0"]),
        ("h1:-1", ["slots of h1", "'-1'"]),
        ("h1:two", ["slots of h1", "'two'"]),
        ("h1:2.5", ["slots of h1", "'2.5'"]),
        ("h1:", ["slots of h1", "''"]),
        ("h1:1000001", ["slots of h1", "1,000,000"]),
        ("h1:" + "9" * 5000, ["slots of h1"]),
        ("[::1]:", ["slots of ::1", "right: [::1]:2"]),
        ("h1:22:2", ["more than one colon", "a port stands in ~/.ssh/config"]),
        ("2001:db8::7", ["two ways", "right: [2001:db8::7] or [2001:db8::7]:2"]),
        ("::1", ["two ways", "right: [::1]"]),
        ("user@::1", ["two ways", "right: [::1]"]),
        ("[fe80::1", ["more than one colon"]),
        ("[fe80::1]x", ["more than one colon"]),
        ("[fe80:::1]", ["no IPv6 address"]),
        ("[fe80::1%]", ["no IPv6 address"]),
        ("[fe80::1%a/b]", ["no IPv6 address"]),
        ("[fe80::1%a,b]", ["no IPv6 address"]),
        ("me:word@h1", ["no name of a user"]),
        ("h1,h2,h1", ["h1 is named twice", "h1:2"]),
        ("n[1-4]:2,n3:4", ["n3 is named twice", "n3:6"]),
        ("n[1,1]", ["n1 is named twice"]),
        ("h1:2,me@h1:3", ["me@h1 is named twice (h1 is the same machine)", "me@h1:5"]),
        ("h1,H1", ["H1 is named twice"]),
        ("h1.example,h1.example.", ["named twice"]),
        ("[::1]:2,[0:0::1]:2", ["named twice", "[0:0::1]:4"]),
        ("n[1-4", ["no node set: its brackets do not match", "right: n[1-4]"]),
        ("n1-4]", ["brackets do not match"]),
        ("n[1-2]]", ["brackets do not match"]),
        ("n[]", ["no node set"]),
        ("n[a-b]", ["no number and no range"]),
        ("n[3-1]", ["no range that runs upwards"]),
        ("n[3-1/2]", ["no node set: ClusterShell says: invalid values", "3-1/2"]),
        ("n[1-3/0]", ["no node set: ClusterShell says: invalid values"]),
        ("n[09-101/2]", ["no node set: ClusterShell says: padding"]),
        ("n[1-3/]", ["no number and no range"]),
        ("n[1-99999999]", ["more than 1,000,000 machines"]),
        ("n[1-99999999999999999999/1]", ["more than 1,000,000 machines"]),
        ("n[1-" + "9" * 5000 + "]", ["more than 1,000,000 machines"]),
        ("n[1-1000]m[1-10000]", ["10000000 hosts"]),
        ("n[0-999999,0-999999]", ["more than 1,000,000 machines"]),
        ("-oProxyCommand=x", ["ssh would read it as an option"]),
        ("-l", ["ssh would read it as an option"]),
        ("me@-l", ["ssh would read it as an option"]),
        ("-me@h1", ["ssh would read it as an option"]),
        ("[-l]", ["no node set"]),
        ("4", ["a resolver would read the number as an address"]),
        ("[1-2]", ["a resolver would read the number as an address"]),
        (".", ["no name of a machine"]),
        ("a@b@c", ["no name of a machine"]),
        ("n1%h", ["no name of a machine"]),
        ("./hosts.txt", ["--hostfile"]),
        ("h1 h2", ["a blank (U+0020)", "right: h1,h2"]),
        ("h1\nh2", ["a blank (U+000A)"]),
        ("h1,\x1ch2", ["U+001C"]),
        ("h\u00a01", ["a blank (U+00A0)"]),
        ("h1\x1b[31m", ["U+001B"]),
        ("h1\0", ["U+0000"]),
        ("h1\x7f", ["U+007F"]),
        ("h\u200b1", ["U+200B"]),
        ("mü", ["U+00FC"]),
        ("n[\u0663]", ["U+0663"]),
        *[(f"h1{char}x", [f"U+{ord(char):04X}"]) for char in ";|&$`'\"\\*?!<>(){}~^#=+"],
        ("$(touch x)", ["U+0024"]),
        ("@", ["no group of machines", "nodeset -LL"]),
        ("@no-such-group", ["no group of machines", "nodeset -LL"]),
        ("@no-such-source:x", ["no group of machines", "GroupResolverSourceError"]),
    ],
)
def test_hosts_refused(text: str, parts: list[str]) -> None:
    shown = refused(lambda: parse_hosts(text), "--hosts", *parts)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert len(shown) < 1500  # however long the text is


def test_a_list_of_too_many_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LIMIT", 5)
    assert len(parse_hosts("n[1-3],m[1-2]").hosts) == 5
    refused(lambda: parse_hosts("n[1-3],m[1-3]"), "more than 5 machines")


def test_twenty_thousand_names_take_no_time() -> None:
    names = [f"h{number}" for number in range(20_000)]
    assert said(parse_hosts(",".join(names))) == same(names)


def test_a_group_that_clustershell_knows(tmp_path: Path) -> None:
    """ClusterShell reads its configuration once, so another process asks."""
    folder = tmp_path / "clustershell"
    folder.mkdir()
    (folder / "groups.conf").write_text(
        "[Main]\ndefault: mine\n[mine]\nmap: echo n[3-4,1]\nall: echo n[1-4]\n[bad]\nmap: echo '-l'\n"
    )
    program = textwrap.dedent("""
        from instep.world.hosts import parse_hosts, RunError
        print([(host.name, host.slots) for host in parse_hosts("h1,@gpu:8").hosts])
        print([(host.name, host.slots) for host in parse_hosts("me@@mine:x").hosts])
        try:
            parse_hosts("@bad:x")
        except RunError as error:
            print(error.what)
    """)
    env = os.environ | {"CLUSTERSHELL_CFGDIR": str(folder)}
    done = run_command([sys.executable, "-c", program], env=env, limit_s=30)
    assert done.out.splitlines() == [
        "[('h1', None), ('n1', 8), ('n3', 8), ('n4', 8)]",
        "[('me@n1', None), ('me@n3', None), ('me@n4', None)]",
        "'-l' is no name of a machine: ssh would read it as an option.",
    ], str(done)


# No digit at the end: ClusterShell takes that of n0[7-10] for padding, Slurm and instep do not.
label = st.from_regex(r"[a-z_]([a-z0-9_]{0,4}[a-z_])?", fullmatch=True)


@st.composite
def node_sets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node set of one or two dimensions and the names that it stands for, written by other means than the reader's."""
    text, names = "", [""]
    for _ in range(draw(st.integers(1, 2))):
        prefix, width = draw(label), draw(st.integers(1, 3))
        pieces, written = [], []
        first = 0
        for _ in range(draw(st.integers(1, 3))):
            first += draw(st.integers(1, 9))
            step = draw(st.integers(1, 3))
            last = first + step * draw(st.integers(0, 3))
            run = [f"{number:0{width}d}" for number in range(first, last + 1, step)]
            written += run
            pieces.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" + (f"/{step}" if step > 1 else ""))
            first = last
        text += f"{prefix}[{','.join(pieces)}]"
        names = [name + prefix + number for name in names for number in written]
    return text, names


@given(node_sets())
@settings(max_examples=200, deadline=None)
def test_node_set_means_what_clustershell_means(node_set: tuple[str, list[str]]) -> None:
    """The same machines; the order is ours, because NodeSet sorts."""
    text, names = node_set
    assert set(names) == set(NodeSet(text))


@pytest.mark.real
@pytest.mark.parametrize(
    "text", ["n[4,1-2]", "b,n[9-11],a", "r[1,0]n[08-10]", "n[001-2]", "n[1-010]", "n[9-011]", "n0[7-10]"]
)
def test_node_set_has_the_order_of_slurm(text: str, tmp_path: Path) -> None:
    needs.need_tool("scontrol")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=none\n"
    )  # it expands lists without a controller
    env = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    done = run_command(["scontrol", "show", "hostnames", text], env=env, limit_s=30).ok()
    assert [host.name for host in parse_hosts(text).hosts] == done.out.split()


@settings(max_examples=200, deadline=None)
@given(node_sets(), st.none() | st.integers(1, 64), st.none() | label)
def test_node_set_stands_for_its_names(node_set: tuple[str, list[str]], slots: int | None, user: str | None) -> None:
    text, names = node_set
    before, after = f"{user}@" if user else "", f":{slots}" if slots else ""
    if len(set(names)) < len(names):  # a[1]b[1] in the same two ways: ab1...
        with pytest.raises(RunError, match="twice"):
            parse_hosts(f"{before}{text}{after}")
        return
    expected = same([before + name for name in names], slots)
    assert said(parse_hosts(f"{before}{text}{after}")) == expected
    assert said(parse_hosts(",".join(f"{before}{name}{after}" for name in names))) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30) | st.text("n12[]-,/:@.% ", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_hosts(text).hosts
    except RunError:
        return
    assert found
    for host in found:
        assert re.fullmatch(r"([\w.-]+@)?[\w.:%-]+", host.name, re.ASCII)
        assert not host.name.startswith("-")


# ---- hostfiles


def hostfile(folder: Path, content: str | bytes) -> Path:
    path = folder / "hosts.txt"
    path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
    return path


OPEN_MPI = """\
    # two nodes of rack 1

    n1 slots=2 max_slots=4
    n2   slots = 2\tmax-slots=2   # the new one
    \t
    root@n3 slots=1
    n[5-6] slots=8
    n7
    2001:db8::7 slots=2
    n8 count=3 max-count=3
"""
MPICH = """\
    n1:2
    n2:4   # four here
    n3
    n4:1 binding=user:0,1 user=me
    n[5-6]:8 ifhn=n5-ib
    [2001:db8::7]:2
"""
DEEPSPEED = """\
    worker-1 slots=4
    worker-0\tslots=4
"""


@pytest.mark.parametrize(
    ("content", "machines"),
    [
        (
            OPEN_MPI,
            [("n1", 2), ("n2", 2), ("root@n3", 1), ("n5", 8), ("n6", 8), ("n7", None), ("2001:db8::7", 2), ("n8", 3)],
        ),
        (MPICH, [("n1", 2), ("n2", 4), ("n3", None), ("me@n4", 1), ("n5", 8), ("n6", 8), ("2001:db8::7", 2)]),
        (DEEPSPEED, [("worker-1", 4), ("worker-0", 4)]),
        ("h", [("h", None)]),
        ("h # no slots\n", [("h", None)]),
        ("h#no blank\n", [("h", None)]),
        ("h:2\r\n\r\n# c\r\ng:3\r\n", [("h", 2), ("g", 3)]),
        (b"\xef\xbb\xbfh slots=2\r\n", [("h", 2)]),
        ("\t h \tslots=2\t \n", [("h", 2)]),
        ("# gr\u00fc\u00dfe\nh\n", [("h", None)]),
    ],
)
def test_hostfile(content: str | bytes, machines: Slots, tmp_path: Path) -> None:
    assert said(read_hostfile(hostfile(tmp_path, content))) == machines


def test_hostfile_says_where(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# c\n\nn1\nm[1-2]:4\n")
    assert read_hostfile(path).hosts == (
        Host("n1", None, f"{path}:3"),
        Host("m1", 4, f"{path}:4"),
        Host("m2", 4, f"{path}:4"),
    )


@pytest.mark.parametrize(
    ("content", "line", "parts"),
    [
        ("n1\nn1\n", 2, ["n1 is named twice", "n1 slots=2"]),
        ("n1 slots=2\nn2\nn1 slots=4\n", 3, ["n1 is named twice", "hosts.txt:1: n1 slots=2", "n1 slots=6"]),
        ("n1\n" * 8, 2, ["n1 is named twice", "n1 slots=8"]),  # as PBS writes it: one line for each slot
        ("n[1-3] slots=2\nme@n2:3\n", 2, ["me@n2 is named twice", "me@n2 slots=5"]),
        ("n1 slots=0\n", 1, ["slots of n1", "right: n1 slots=2", "wrong: n1 slots=0"]),
        ("n1 slots=\n", 1, ["slots of n1"]),
        ("n1 slots=-1\n", 1, ["slots of n1"]),
        ("n1 slots=\u0663\n", 1, ["slots of n1"]),
        ("n1 slots=2x\n", 1, ["slots of n1"]),
        ("n1 slots=2 max_slots=0\n", 1, ["max_slots of n1"]),
        ("n1 slots=4 max_slots=2\n", 1, ["max_slots is less than the slots", "right: n1 slots=4 max_slots=4"]),
        ("n1:4 slots-max=2\n", 1, ["slots-max is less than the slots"]),
        ("n1 slots=2 slots=2\n", 1, ["slots is said twice"]),
        ("n1 slots=2 cpu=2\n", 1, ["slots and cpu are one thing"]),
        ("n1:2 slots=2\n", 1, ["cannot stand in its name here"]),
        ("[::1]:2 slots=2\n", 1, ["cannot stand in its name here"]),
        ("n1 slot=2\n", 1, ["'slot'", "Known are: slots, max_slots, max-slots, user, binding, ifhn."]),
        ("n1 sockets=2\n", 1, ["'sockets'", "Known are: slots"]),
        ("n1 port=2222\n", 1, ["'port'", "~/.ssh/config"]),
        ("n1 n2\n", 1, ["'n2' is no key with a value", "one machine a line"]),
        ("n1 slots 2\n", 1, ["'slots' is no key with a value"]),
        ("n1,n2 slots=2\n", 1, ["several machines in one place"]),
        ("me@n1 user=you\n", 1, ["user of me@n1 is said twice"]),
        ("n1 user=-l\n", 1, ["ssh would read it as an option"]),
        ("n1 user=a user_name=b\n", 1, ["user and user_name are one thing"]),
        ("\n\nn[1-4\n", 3, ["brackets do not match"]),
        ("n1\n-oX=y\n", 2, ["ssh would read it"]),
        ("::1\n", 1, ["two ways"]),
        ("n1\u00a0slots=2\n", 1, ["U+00A0", "n1\\xa0slots=2"]),
        ("n1\rn2\r", 1, ["U+000D"]),
        ("n1\n// c\n", 2, ["'c' is no key"]),
        ("^n1\n", 1, ["U+005E"]),
        ("n1\n+n0 slots=2\n", 2, ["U+002B"]),
        ("rank 0=n1 slot=0\n", 1, ["'0'"]),
        ("=2\n", 1, ["U+003D"]),
        ("n1 " + "x" * 100_000 + "\n", 1, ["no key with a value"]),
    ],
)
def test_hostfile_refused(content: str, line: int, parts: list[str], tmp_path: Path) -> None:
    path = hostfile(tmp_path, content)
    shown = refused(lambda: read_hostfile(path), f"{path}:{line}: ", *parts)
    assert len(shown) < 2500


@pytest.mark.parametrize("content", ["", "\n\n", "# n1\n", " \t\r\n", "\ufeff"])
def test_hostfile_without_machines(content: str, tmp_path: Path) -> None:
    path = hostfile(tmp_path, content)
    refused(lambda: read_hostfile(path), "names no machine", str(path), "n1 slots=2")


@pytest.mark.parametrize("read", [read_hostfile, read_inventory])
def test_unreadable(read: Callable[[Path], HostList], tmp_path: Path) -> None:
    refused(lambda: read(tmp_path / "none"), "No such file", str(tmp_path / "none"), "ls -l")
    refused(lambda: read(tmp_path), "Is a directory")
    refused(lambda: read(tmp_path / "a\0b"), "null byte")
    refused(lambda: read(hostfile(tmp_path, b"n1\nn2\xff\n")), "no text in UTF-8", "hosts.txt:2: ")
    refused(lambda: read(hostfile(tmp_path, "n1\n".encode("utf-16"))), "no text in UTF-8", "hosts.txt:1: ")
    refused(
        lambda: read(Path(sys.executable).resolve()),
        "UTF-8" if Path(sys.executable).stat().st_size < 64 << 20 else "large",
    )
    refused(lambda: read(Path("/dev/zero")), "too large")


def test_nul_is_no_text(tmp_path: Path) -> None:
    path = hostfile(tmp_path, b"n1\nn2\0\n")
    refused(lambda: read_hostfile(path), "no text in UTF-8", "hosts.txt:2: ")


def test_no_permission(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "n1\n")
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything; nobody may not
    try:
        refused(lambda: read_hostfile(path), "Permission denied", str(path))
    finally:
        os.seteuid(user)


def test_hostfile_from_a_pipe() -> None:
    """``--hostfile <(command)``: the shell gives a pipe, which has no size and is no regular file."""
    inner, outer = os.pipe()
    os.write(outer, b"n1 slots=2\n")
    os.close(outer)
    try:
        assert said(read_hostfile(Path(f"/dev/fd/{inner}"))) == [("n1", 2)]
    finally:
        os.close(inner)


# ---- inventories


def inventory(folder: Path, content: str) -> Path:
    path = folder / "machines.toml"
    path.write_bytes(textwrap.dedent(content).encode())
    return path


def test_inventory(tmp_path: Path) -> None:
    (tmp_path / "ssh_config").write_text("Host n1\n  ProxyJump gate\n")
    path = inventory(
        tmp_path,
        """\
        # the lab
        ssh_config = "ssh_config"
        head = "n2"

        [[machines]]
        name = "n2"           # first, so rank 0 runs there
        address = "10.77.0.2"
        slots = 2

        [[ machines ]]
        address = "fe80::1%eth0"
        'name' = "me@n1"

        [[machines]]
        name = "m[3,1-2]"
        slots = 8
        [[machines]]
        name = "2001:db8::7"
        """,
    )
    found = read_inventory(path)
    assert found == HostList(
        (
            Host("n2", 2, f"{path}:6", "10.77.0.2"),
            Host("me@n1", None, f"{path}:12", "fe80::1%eth0"),
            Host("m3", 8, f"{path}:15"),
            Host("m1", 8, f"{path}:15"),
            Host("m2", 8, f"{path}:15"),
            Host("2001:db8::7", None, f"{path}:18"),
        ),
        ssh_config=tmp_path / "ssh_config",
        head="n2",
    )


def test_inventory_in_other_ways_to_write_it(tmp_path: Path) -> None:
    text = '\ufeffhead = "[::1]"\r\nmachines = [{name = "[::1]", slots = 2},\r\n {name = "n1", address = "[::2]"}]\r\n'
    path = inventory(tmp_path, text)
    assert read_inventory(path) == HostList(
        (Host("::1", 2, str(path)), Host("n1", None, str(path), "::2")), ssh_config=None, head="::1"
    )


def test_ssh_config_is_found_from_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "config").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "lab"))
    for text in ("config", "../lab/config", str(tmp_path / "lab" / "config"), "~/config"):
        inventory(tmp_path / "lab", f'ssh_config = "{text}"\n[[machines]]\nname = "n1"\n')
        found = read_inventory(Path("lab/machines.toml")).ssh_config
        assert found
        assert found.is_absolute()
        assert found.samefile(tmp_path / "lab" / "config")


M = '[[machines]]\nname = "n1"\n'


@pytest.mark.parametrize(
    ("content", "where", "parts"),
    [
        ("", ": no 'machines'", ["no list of machines", "[[machines]]"]),
        ('head = "n1"\n', ": no 'machines'", ["no list of machines"]),
        ("machines = []\n", ":1: machines = []", ["no list of machines"]),
        ('machines = ["n1"]\n', ":1: machines", ["no list of machines"]),
        ('\n[machines]\nname = "n1"\n', ":2: [machines]", ["no list of machines", "right: [[machines]]"]),
        (f"{M}slots = \n", ":3:9: slots = ", ["no TOML", "line 3, column 9"]),
        ('[[machines]]\nname = "n1', ":2:11: ", ["no TOML", "line 2, column 11"]),
        ("n1 slots=2\n", ":1:4: n1 slots=2", ["no TOML", "line 1, column 4"]),
        (f"x = {'9' * 5000}\n", ":", ["no TOML"]),
        (f"x = {'[' * 5000}\n", ":", ["no TOML"]),
        (f'{M}[cluster]\nname = "c"\n', ":3: [cluster]", ["'cluster'", "Known are: ssh_config, head, machines."]),
        ('ssh-config = "x"\n' + M, ":1: ssh-config", ["'ssh-config'", "Known are: ssh_config"]),
        (f"{M}ranks = 2\n", ":3: ranks = 2", ["'ranks'", "Known are: name, address, slots."]),
        (f"{M}port = 22\n", ":3: port = 22", ["'port'", "ssh configuration"]),
        (f'{M}head = "n1"\n', ':3: head = "n1"', ["'head'", "above the first [[machines]]"]),
        ("[[machines]]\nslots = 2\n", ":1: [[machines]]", ["without a name"]),
        ('[[machines]]\nname = ""\n', ":2: name", ["name has to be a text"]),
        ("[[machines]]\nname = 7\n", ":2: name = 7", ["name has to be a text"]),
        ('[[machines]]\nname = "n1:2"\n', ":2: name", ["cannot stand in its name here", "slots = 2"]),
        ('[[machines]]\nname = "n1,n2"\n', ":2: name", ["several machines"]),
        ('[[machines]]\nname = "n1 "\n', ":2: name", ["U+0020", 'right: name = "h1"']),
        ('[[machines]]\nname = "-l"\n', ":2: name", ["ssh would read it"]),
        ('[[machines]]\nname = "n[1-"\n', ":2: name", ["brackets do not match"]),
        (f'{M}slots = "2"\n', ':3: slots = "2"', ["whole number", "right: slots = 2"]),
        (f"{M}slots = true\n", ":3: slots = true", ["whole number"]),
        (f'head = """\n[[machines]]\n"""\n{M}slots = 0\n', ": machines[0] = {'name': 'n1'", ["slots of n1"]),
        (f"{M}slots = 2.0\n", ":3: slots = 2.0", ["whole number"]),
        (f"{M}slots = 0\n", ":3: slots = 0", ["slots of n1"]),
        (f"{M}slots = -2\n", ":3: slots = -2", ["slots of n1"]),
        (f'{M}address = "me@h"\n', ":3: address", ["no name of a machine"]),
        (f'{M}address = "h:22"\n', ":3: address", ["no IPv6 address"]),
        (f'{M}address = "-oX"\n', ":3: address", ["ssh would read it"]),
        (f'{M}address = "a b"\n', ":3: address", ["U+0020"]),
        (f"{M}address = 1.2\n", ":3: address", ["address has to be a text"]),
        ('[[machines]]\nname = "n[1-2]"\naddress = "h"\n', ":3: address", ["2 machines cannot share the address h"]),
        (M + M, ":4: name", ["n1 is named twice", ":2: name", "slots = 2"]),
        (f'{M}[[machines]]\nname = "me@N1"\n', ":4: name", ["me@N1 is named twice"]),
        (
            f'{M}address = "10.0.0.1"\n[[machines]]\nname = "n2"\naddress = "10.0.0.1"\n',
            ":5: name",
            ["n1 and n2 are at one address: 10.0.0.1"],
        ),
        (f'{M}address = "n2"\n[[machines]]\nname = "n2"\n', ":5: name", ["n1 and n2 are at one address"]),
        (f'ssh_config = "none"\n{M}', ":1: ssh_config", ["'none' cannot be read: No such file"]),
        (f'ssh_config = "."\n{M}', ":1: ssh_config", ["Is a directory"]),
        (f'ssh_config = "~no-such-user/x"\n{M}', ":1: ssh_config", ["cannot be read"]),
        (f'ssh_config = ""\n{M}', ":1: ssh_config", ["ssh_config has to be a text"]),
        (f"ssh_config = 1\n{M}", ":1: ssh_config", ["ssh_config has to be a text"]),
        (f'head = "n2"\n{M}', ":1: head", ["'n2' is none of the machines", "one of: n1"]),
        (f'head = "n[1-2]"\n{M}', ":1: head", ["none of the machines"]),
        (f'head = ["n1"]\n{M}', ":1: head", ["head has to be a text"]),
        ('machines = [{name = "n1"}, {name = "n1", slots = 2}]\n', ": machines[1] = ", ["n1 is named twice"]),
    ],
)
def test_inventory_refused(content: str, where: str, parts: list[str], tmp_path: Path) -> None:
    path = inventory(tmp_path, content)
    refused(lambda: read_inventory(path), f"{path}{where}", *parts)


def test_names_are_read_without_clustershell(tmp_path: Path) -> None:
    """Only steps and groups need it, so that plain lists cost no import of it."""
    program = "import sys; from instep.world.hosts import parse_hosts; parse_hosts('n[1-4]:2'); print('ClusterShell' in sys.modules)"
    done = run_command([sys.executable, "-c", program], cwd=tmp_path, limit_s=30).ok()
    assert done.out.strip() == "False"
    assert hostnames.LIMIT == 1_000_000


def test_the_page_shows_what_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    (file,) = [block for block in re.findall(r"```\n(.*?)```", page, re.DOTALL) if "hosts.txt" in block]
    assert said(read_hostfile(hostfile(tmp_path, file))) == [
        ("n1", 2),
        ("n2", 2),
        ("me@n3", None),
        *same(["n5", "n6", "n7", "n8"], 8),
    ]
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ssh_config").touch()
    assert said(read_inventory(inventory(tmp_path, toml))) == [("n1", 2), *same(["n2", "n3", "n4"])]
    rows = dict(re.findall(r"^\| `([^`@]+)` \| (n[^|]*?|rack[^|]*?) \|$", page, re.MULTILINE))
    assert len(rows) == 4
    for text, means in rows.items():
        names = re.findall(r"\b(?:rack\d)?n\d+\b", means)
        assert [host.name for host in parse_hosts(text).hosts] == names, text
