"""Which machines: ``--hosts``, a hostfile of Open MPI, MPICH or DeepSpeed, or an inventory become one HostList.

The order is the user's: rank 0 runs on the first machine.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import RunError
from instep.world.hostnames import (
    LIMIT,
    Said,
    check_characters,
    check_name,
    in_toml,
    ipv6,
    read_item,
    read_slots,
    split_items,
    with_colon,
    with_key,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_LARGEST = 64 << 20  # bytes of a file; a checkpoint given by mistake must not fill it either
_SLOTS = ("slots", "cpu", "count")  # three names that Open MPI has for one thing
_MAX_SLOTS = tuple(f"{a}{dash}{b}" for key in _SLOTS for dash in "_-" for a, b in (("max", key), (key, "max")))
_USER = ("user", "username", "user-name", "user_name")  # MPICH; Open MPI
_UNUSED = ("binding", "ifhn")  # MPICH's pinning and network interface: mpiexec's own affair
_INVENTORY_KEYS = ("ssh_config", "head", "machines")
_MACHINE_KEYS = ("name", "address", "slots")


@dataclass(frozen=True)
class Host:
    """One machine as the user named it.

    Attributes:
        name: what ssh is given: a name, alias or address, ``user@host`` allowed; IPv6 without brackets.
        slots: ranks there; None: --nproc, or one per GPU, or one.
        source: where it was said: ``--hosts``, ``hosts.txt:3``.
        address: from an inventory: where it is reached; "" is by its name.

    """

    name: str
    slots: int | None = None
    source: str = ""
    address: str = ""


@dataclass(frozen=True)
class HostList:
    """The machines in the user's order: rank 0 runs on the first.

    Attributes:
        hosts: at least one, none twice.
        ssh_config: from an inventory: handed to ``ssh -F``; an absolute path.
        head: from an inventory: the machine where mpirun, srun and sbatch are started; "" is this one.

    """

    hosts: tuple[Host, ...]
    ssh_config: Path | None = None
    head: str = ""


def parse_hosts(text: str) -> HostList:
    """The machines of ``--hosts``: ``h1:2,user@h2:2``, ``n[1-4]:8``, ``[fe80::1]:2``, ``@group``.

    What follows the colon is always the number of ranks there, never a port: ports stand in the ssh configuration.

    Raises:
        RunError: the text names no machines, or not clearly.

    """
    said = Said("--hosts", text, with_colon)
    if not text.strip():
        raise said.error("--hosts names no machine.", right="--hosts h1:2,h2:2", wrong="--hosts ''")
    found: list[_Found] = []
    for item in split_items(text):
        if not item:
            raise said.error("Between two commas of --hosts there is no machine.", right="h1,h2", wrong="h1,,h2  h1,")
        names, slots = read_item(item, said)
        _add(found, (Host(name, slots, said.source) for name in names), said)
    return HostList(_each_once(found))


def read_hostfile(path: Path) -> HostList:
    """The machines of a hostfile: one a line, ``h slots=2 max_slots=4``, ``h:2`` or ``h``; ``#`` begins a comment.

    Raises:
        RunError: the file cannot be read, or names no machines, or not clearly.

    """
    found: list[_Found] = []
    text = _read(path, "hostfile")
    for number, line in enumerate(text.split("\n"), 1):
        said = Said(f"{path}:{number}", line.rstrip("\r"), with_key)
        words = re.sub(r"[ \t]*=[ \t]*", "=", said.line.partition("#")[0]).strip(" \t")
        if words:
            names, slots = _read_line(re.split(r"[ \t]+", words), said)
            _add(found, (Host(name, slots, said.source) for name in names), said)
    if not found:
        raise RunError(
            "The hostfile names no machine.",
            evidence=[f"{path}: {len(text.splitlines())} lines, all of them blank or comments"],
            cure="Write one machine a line, such as:  n1 slots=2",
        )
    return HostList(_each_once(found))


def read_inventory(path: Path) -> HostList:
    """The machines of an inventory: a TOML file of ``ssh_config``, ``head`` and ``[[machines]]``.

    Raises:
        RunError: the file cannot be read, or names no machines, or not clearly.

    """
    text = _read(path, "inventory")
    content = _toml(text, path)
    where = _Lines(path, text, content)
    for key in content:
        if key not in _INVENTORY_KEYS:
            raise where.said(key).unknown(key, _INVENTORY_KEYS)
    machines = content.get("machines")
    if not machines or not isinstance(machines, list) or not all(isinstance(entry, dict) for entry in machines):
        raise where.said("machines").error(
            "The inventory has no list of machines.",
            right='[[machines]]\nname = "n1"',
            wrong='[machines]  machines = ["n1"]',
        )
    found: list[_Found] = []
    for index, entry in enumerate(machines):
        _add(found, _read_machine(entry, index, where), where.said("name", index))
    hosts = _each_once(found)
    return HostList(hosts, _ssh_config(content, where), _head(content, hosts, where))


# ---- what the three ways have in common

_Found = tuple[Host, Said]


def _add(found: list[_Found], hosts: Iterable[Host], said: Said) -> None:
    found += [(host, said) for host in hosts]
    if len(found) > LIMIT:
        raise said.error(f"The list has more than {LIMIT:,} machines.", right="n[1-4]", wrong="n[1-99999999]")


def _each_once(found: list[_Found]) -> tuple[Host, ...]:
    """The hosts, if no two of them are one machine."""
    seen: dict[str, int] = {}
    for index, (host, said) in enumerate(found):
        for key in (_same(host.name), _same(host.address or host.name)):
            first = seen.setdefault(key, index)
            if first != index:
                raise _twice(found, key, (found[first], (host, said)))
    return tuple(host for host, _ in found)


def _twice(found: list[_Found], key: str, two: tuple[_Found, _Found]) -> RunError:
    (before, there), (again, here) = two
    evidence = list(dict.fromkeys([str(there), str(here)]))
    if _same(before.name) != _same(again.name):
        what = f"{before.name} and {again.name} are at one address: {key}."
        return RunError(what, evidence=evidence, cure="Give each machine its own address, or one name only.")
    ranks = sum(host.slots or 1 for host, _ in found if _same(host.name) == key)
    return RunError(
        f"{again.name} is named twice"
        + (f" ({before.name} is the same machine)." if before.name != again.name else "."),
        evidence=evidence,
        cure=f"Write it once, with the sum of its slots:\n{here.write(again.name, ranks)}",
    )


def _same(name: str) -> str:
    """What two names of one machine have in common: DNS and ssh do not tell N1 from n1."""
    host = name.rpartition("@")[2].lower().rstrip(".")
    return str(ipaddress.ip_address(host)) if ":" in host else host


# ---- a hostfile


def _read_line(words: list[str], said: Said) -> tuple[list[str], int | None]:
    """The machines of a line that is no comment, and the slots of each."""
    values = _keys(words[1:], said)
    key = _one_of(_SLOTS, values, said)
    names, slots = read_item(words[0], said, colon=not key)
    if key:
        slots = read_slots(values[key], names[0], said)
    most = _one_of(_MAX_SLOTS, values, said)
    if most and read_slots(values[most], names[0], said, most) < (slots or 1):
        right = f"{said.write(names[0], slots or 1)} {most}={slots or 1}"
        raise said.error(f"{most} is less than the slots of {names[0]}.", right=right, wrong=said.line)
    user = _one_of(_USER, values, said)
    if user:
        if "@" in words[0]:
            raise said.error(f"The user of {words[0]} is said twice.", right=said.write(names[0], slots or 1))
        check_name(values[user], "user", said)
        names = [f"{values[user]}@{name}" for name in names]
    return names, slots


def _keys(words: list[str], said: Said) -> dict[str, str]:
    """``slots=2 max_slots=4`` as a mapping."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            right = f"one machine a line, then its keys:\n{said.write('n1', 2)}"
            raise said.error(f"{word!r} is no key with a value.", right=right, wrong=said.line)
        if key not in (*_SLOTS, *_MAX_SLOTS, *_USER, *_UNUSED):
            why = ": ports stand in ~/.ssh/config, see docs/hosts.md" if key == "port" else ""
            raise said.unknown(key, ("slots", "max_slots", "max-slots", "user", *_UNUSED), why)
        if key in values:
            raise said.error(f"{key} is said twice.", right=said.write("n1", 2), wrong=said.line)
        values[key] = value
    return values


def _one_of(names: Sequence[str], values: Mapping[str, str], said: Said) -> str:
    """The one of these names for one thing that is used; "" if none."""
    used = [name for name in names if name in values]
    if len(used) > 1:
        raise said.error(f"{used[0]} and {used[1]} are one thing.", right=said.write("n1", 2), wrong=said.line)
    return used[0] if used else ""


def _read(path: Path, what: str) -> str:
    """The text of a file, without a byte order mark. A pipe will do: ``--hostfile <(command)``."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"The {what} cannot be read: {why}.", evidence=[str(path)], cure=f"Look at it:  ls -l {str(path)!r}"
        ) from None
    if len(data) > _LARGEST:
        raise RunError(
            f"The {what} is too large: more than {_LARGEST >> 20} MiB.",
            evidence=[str(path)],
            cure="Name a text file with one machine a line.",
        )
    try:
        text = data.decode("utf-8-sig")
        bad = text.find("\0")
        line = text.count("\n", 0, bad) + 1
    except UnicodeDecodeError as error:
        bad, line, text = error.start, data.count(b"\n", 0, error.start) + 1, ""
    if bad >= 0:
        raise RunError(
            f"The {what} is no text in UTF-8.",
            evidence=[f"{path}:{line}: {data[max(0, bad - 8) : bad + 8]!r}"],
            cure=f"Name a text file, or save it as UTF-8; what it is:  file {str(path)!r}",
        )
    return text


# ---- an inventory


class _Lines:
    """Where the keys of an inventory stand: TOML readers do not tell."""

    def __init__(self, path: Path, text: str, content: Mapping[str, Any]) -> None:
        self.path = path
        self._lines = [line.rstrip("\r") for line in text.split("\n")]
        heads = [n for n, line in enumerate(self._lines) if re.match(r"""\s*\[\[\s*["']?machines["']?\s*\]\]""", line)]
        machines = content.get("machines")
        self._machines = machines if isinstance(machines, list) else []
        # Machines written in another way ({...} in a list) are found by their number only.
        self._heads = heads if len(heads) == len(self._machines) else []

    def said(self, key: str, machine: int | None = None) -> Said:
        """The line of a key, at the top or in a machine; else of the machine; else the key alone."""
        if machine is not None and not self._heads:
            return Said(str(self.path), f"machines[{machine}] = {self._machines[machine]}", in_toml)
        first = 0 if machine is None else self._heads[machine]
        last = len(self._lines) if machine is None else [*self._heads, len(self._lines)][machine + 1]
        pattern = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*([=.\]]|$)""")
        for number in range(first, last):
            if pattern.match(self._lines[number]):
                return Said(f"{self.path}:{number + 1}", self._lines[number], in_toml)
        if machine is not None:
            return Said(f"{self.path}:{first + 1}", self._lines[first], in_toml)
        return Said(str(self.path), f"no {key!r} found", in_toml)


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; int() has others
        at = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        lines = text.split("\n")
        number, column = (int(at[1]), int(at[2])) if at else (len(lines), len(lines[-1]) + 1)
        said = Said(f"{path}:{number}:{column}", lines[number - 1], in_toml)
        why = str(error).partition(" (at ")[0]
        right = '[[machines]]\nname = "n1"\nslots = 2'
        raise said.error(f"The inventory is no TOML: {why} (line {number}, column {column}).", right=right) from None


def _read_machine(entry: Mapping[str, Any], index: int, where: _Lines) -> list[Host]:
    for key in entry:
        if key not in _MACHINE_KEYS:
            why = ""
            if key in _INVENTORY_KEYS:
                why = ": it stands above the first [[machines]], or it belongs to the machine before it"
            elif key in ("user", "port"):
                why = ": users and ports stand in the ssh configuration, see docs/hosts.md"
            raise where.said(key, index).unknown(key, _MACHINE_KEYS, why)
    said = where.said("name", index)
    name = _string(entry, "name", said)
    if not name:
        raise said.error("A machine without a name.", right=in_toml("n1", 2))
    names, _ = read_item(name, said, colon=False)
    slots = entry.get("slots")
    if slots is not None:
        said_slots = where.said("slots", index)
        if not isinstance(slots, int):  # true is an int to Python: read_slots refuses its text
            raise said_slots.error(f"The slots of {name} have to be a whole number.", right="slots = 2")
        read_slots(str(slots), names[0], said_slots)
    address = _address(entry, names, where.said("address", index))
    return [Host(each, slots, said.source, address) for each in names]


def _address(entry: Mapping[str, Any], names: list[str], said: Said) -> str:
    address = _string(entry, "address", said)
    if not address:
        return ""
    if len(names) > 1:
        right = 'one [[machines]] for each, or names that ssh knows:\nname = "n1"\naddress = "10.77.0.1"'
        raise said.error(f"{len(names)} machines cannot share the address {address}.", right=right)
    check_characters(address, said)
    bare = re.sub(r"^\[(.*)\]$", r"\1", address)
    if ":" in bare:
        return ipv6(bare, said)
    check_name(bare, "machine", said)
    return bare


def _string(entry: Mapping[str, Any], key: str, said: Said) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str) or (key in entry and not value):
        raise said.error(f"{key} has to be a text.", right=f'{key} = "..."')
    return value


def _ssh_config(content: Mapping[str, Any], where: _Lines) -> Path | None:
    said = where.said("ssh_config")
    text = _string(content, "ssh_config", said)
    if not text:
        return None
    try:
        path = (where.path.parent / Path(text).expanduser()).absolute()
        with path.open("rb"):
            return path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user of an unknown user
        why = getattr(error, "strerror", None) or str(error)
        right = f"a file, named absolutely or from the folder of the inventory, {where.path.parent.absolute()}"
        raise said.error(f"The ssh_config {text!r} cannot be read: {why}.", right=right) from None


def _head(content: Mapping[str, Any], hosts: Sequence[Host], where: _Lines) -> str:
    said = where.said("head")
    head = re.sub(r"\[(.*:.*)\]$", r"\1", _string(content, "head", said))
    names = [host.name for host in hosts]
    if head and head not in names:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise said.error(f"The head {head!r} is none of the machines.", right=f"one of: {some}")
    return head
