"""The names of machines: ``h:2``, ``user@n[1-4]:8``, ``[fe80::1]:2`` and ``@group`` become names and slots.

The order is the user's. ClusterShell's NodeSet sorts what it reads, so it reads only what
:mod:`instep.world.nodelist` (Slurm's lists, order kept, size bounded) does not know: steps and groups.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.errors import RunError, WorldError
from instep.world import nodelist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT = 1_000_000  # machines, and ranks on one; a typing error such as n[1-99999999] must not fill the memory
_SHOWN = 200  # characters of an offending line


# ---- what was said, and where


def with_colon(name: str, slots: int) -> str:
    """As ``--hosts`` has it."""
    return f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}"


def with_key(name: str, slots: int) -> str:
    """As a hostfile has it."""
    return f"{name} slots={slots}"


def in_toml(name: str, slots: int) -> str:
    """As an inventory has it."""
    return f'name = "{name}"\nslots = {slots}'


@dataclass(frozen=True)
class Said:
    """A line that names machines, where it stands, and how its form writes a machine with slots."""

    source: str
    line: str
    write: Callable[[str, int], str]

    def __str__(self) -> str:
        return f"{self.source}: {short(self.line)}"

    def error(self, what: str, *, right: str, wrong: str = "") -> RunError:
        """The error, with the line as evidence and the right and the wrong form as its cure."""
        lines = [("right: ", right), *([("wrong: ", short(wrong.strip()))] if wrong else [])]
        cure = "\n".join(word + text.replace("\n", "\n" + " " * len(word)) for word, text in lines)
        if len(what) > 2 * _SHOWN:  # the reason stands at the end
            what = f"{what[:_SHOWN]}...{what[-_SHOWN:]}"
        return RunError(what, evidence=[str(self)], cure=cure)

    def unknown(self, key: str, known: Sequence[str], why: str = "") -> RunError:
        """The error of a key that nobody reads here."""
        return RunError(
            f"{key!r} is no key that is known here{why}.", evidence=[str(self)], cure=f"Known are: {', '.join(known)}."
        )


def short(text: str) -> str:
    """The text on a terminal: one line, cut off, and what would not be seen written as its escape."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_SHOWN].replace("\t", " "))
    return shown + ("..." if len(text) > _SHOWN else "")


# ---- one item: a name or a node set, and its slots


def split_items(text: str) -> list[str]:
    """What stands between the commas outside of brackets; a bracket without an end runs to the end of the text."""
    items = [""]
    for part in re.findall(r"\[[^\]]*\]?|,|[^,\[]+", text):
        if part == ",":
            items.append("")
        else:
            items[-1] += part
    return [item.strip(" \t") for item in items]


def read_item(item: str, said: Said, *, colon: bool = True) -> tuple[list[str], int | None]:
    """The names and slots of ``h:2``, ``user@n[1-4]:8``, ``[fe80::1]``.

    Args:
        item: the text.
        said: the line where it stands.
        colon: the slots may follow a colon; False: they are said elsewhere, so that ``fe80::1`` is no riddle.

    """
    if item.startswith("-"):
        check_name(item, "machine", said)
    check_characters(item, said)
    user, at, rest = item.partition("@")
    if not at or not user:  # a plain name, or a @group
        user, at, rest = "", "", item
    if at:
        check_name(user, "user", said)
    if "," in re.sub(r"\[[^\]]*\]", "", rest):
        raise said.error(f"{item!r} names several machines in one place.", right="one machine, or one node set: n[1-4]")
    literal = re.fullmatch(r"\[([^\]]*:[^\]]*)\](?::(.*))?", rest)
    if literal:
        names, slots = [ipv6(literal[1], said)], literal[2]
    elif rest.startswith("@"):  # @group or @source:group
        group = re.fullmatch(r"(@.*?)(?::(\d+))?", rest)
        assert group  # the pattern takes any text
        names, slots = _group(group[1], said), group[2]
    else:
        set_, slots = _split_slots(rest, said, colon=colon)
        names = [ipv6(set_, said)] if ":" in set_ else _expand(set_, said)
    if slots is not None and not colon:
        raise said.error(
            f"The slots of {item!r} cannot stand in its name here.", right=said.write(names[0], 2), wrong=item
        )
    return [user + at + name for name in names], None if slots is None else read_slots(slots, names[0], said)


def _split_slots(text: str, said: Said, *, colon: bool) -> tuple[str, str | None]:
    name, found, slots = text.partition(":")
    if not found:
        return name, None
    if ":" not in slots:
        return name, slots
    if not _is_ipv6(text):
        right = f"{said.write('h1', 2)}   (2 ranks; a port stands in ~/.ssh/config, see docs/hosts.md)"
        raise said.error(f"{text!r} has more than one colon and is no IPv6 address.", right=right, wrong=text)
    if colon:
        right = f"[{text}] or [{text}]:2"
        raise said.error(f"{text!r} can be read in two ways: its end may be slots.", right=right, wrong=text)
    return text, None


def _expand(text: str, said: Said) -> list[str]:
    """The machines of a node set, in its own order."""
    if _size(text) > LIMIT:
        raise said.error(f"{text!r} stands for more than {LIMIT:,} machines.", right="n[1-4]", wrong=text)
    try:
        names = nodelist.expand(re.sub(r"\d+-\d+/\d+", _write_out, text)) if text else []
    except (WorldError, ValueError) as error:
        why = error.what.partition(": ")[2] if isinstance(error, WorldError) else f"{error}."
        right = "n[1-4]   n[01-03,07]   n[0-8/2]   rack[0-1]node[1-2]"
        raise said.error(f"{text!r} is no node set: {why}", right=right, wrong=text) from None
    if not names:
        raise said.error("A machine without a name.", right=said.write("h1", 2), wrong=said.line)
    for name in names:
        check_name(name, "machine", said)
    return names


def _size(text: str) -> int:
    """How many numbers stand in the brackets, counted without writing them out."""
    pieces = [piece for inside in re.findall(r"\[([^\]]*)\]", text) for piece in inside.split(",")]
    size = 0
    for piece in pieces:
        if re.search(r"\d{19}", piece):
            return LIMIT + 1
        match = re.fullmatch(r"(\d+)-(\d+)(?:/(\d+))?", piece)
        size += max(1, (int(match[2]) - int(match[1])) // max(1, int(match[3] or 1)) + 1) if match else 1
    return size


def _write_out(match: re.Match[str]) -> str:
    """``0-4/2`` is ``0,2,4``: each range alone, because ClusterShell would sort them all."""
    from ClusterShell.RangeSet import RangeSet, RangeSetException  # type: ignore[import-untyped]

    try:
        return ",".join(RangeSet(match[0]).striter())
    except RangeSetException as error:
        raise ValueError(f"ClusterShell says: {error}") from None


def _group(text: str, said: Said) -> list[str]:
    """The machines of a group that ClusterShell is configured for, sorted by ClusterShell."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # type: ignore[import-untyped]
    from ClusterShell.NodeUtils import GroupResolverError, GroupSourceError  # type: ignore[import-untyped]

    try:
        names = [str(name) for name in NodeSet(text)]
        why = "it has no machines"
    except (NodeSetException, GroupResolverError, GroupSourceError) as error:
        names, why = [], f"ClusterShell says: {type(error).__name__}: {error}"
    if not names:
        cure = "Show the groups that ClusterShell knows:  nodeset -LL   (they stand in groups.conf of ClusterShell)"
        raise RunError(f"{text!r} is no group of machines: {why}.", evidence=[str(said)], cure=cure)
    for name in names:
        check_name(name, "machine", said)
    return names


def check_characters(text: str, said: Said) -> None:
    """Refuse blanks, control characters, what a shell reads, and letters beyond ASCII."""
    bad = re.search(r"[^A-Za-z0-9._:%@\[\],/-]", text)
    if not bad:
        return
    char = bad[0]
    named = f"a blank (U+{ord(char):04X})" if char.isspace() else f"{char!r} (U+{ord(char):04X})"
    right = "letters, digits and . - _ ; user@host, n[1-4], [fe80::1]"
    if char.isspace():
        right = "h1,h2" if said.write is with_colon else said.write("h1", 2)
    raise said.error(f"{text!r} holds {named}, which no name of a machine can have.", right=right)


def check_name(name: str, what: str, said: Said) -> None:
    """Refuse what ssh, a shell or a resolver would take for something else."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) and not (what == "machine" and name.isdigit()):
        return
    if name.startswith("-"):
        why = "ssh would read it as an option"
    elif name.isdigit():
        why = "a resolver would read the number as an address"
    elif "/" in name:
        why = "it holds a /; a file that lists machines is given by --hostfile"
    else:
        why = "one has letters, digits and . - _ and begins with a letter, a digit or _"
    right = said.write("user@n1" if what == "user" else "n1", 2)
    raise said.error(f"{name!r} is no name of a {what}: {why}.", right=right, wrong=name)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def ipv6(text: str, said: Said) -> str:
    """The address, ``%eth0`` at its end allowed, if it is one."""
    scope = text.partition("%")[2]
    if not _is_ipv6(text) or (scope and not re.fullmatch(r"[A-Za-z0-9._-]+", scope)):
        raise said.error(f"{text!r} is no IPv6 address.", right="[2001:db8::7]:2   [fe80::1%eth0]:2", wrong=text)
    return text


def read_slots(text: str, name: str, said: Said, what: str = "slots") -> int:
    """The number of ranks on a machine."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= LIMIT:
        raise said.error(
            f"The {what} of {name} have to be a whole number from 1 to {LIMIT:,}, not {text!r}.",
            right=said.write(name, 2),
            wrong=said.line,
        )
    return int(text)
