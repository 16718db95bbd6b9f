"""What is known of each rank: plain values, as they travel from the recorder in the rank to the watch outside."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

End = Literal["finished", "failed", "killed"]


@dataclass(frozen=True)
class Frame:
    """One place in a stack.

    Attributes:
        file: absolute path.
        line: from 1.
        function: the code's qualified name where known.
        user: whether it is the user's code: neither torch's, nor a library's in site-packages, nor Python's, nor ours.
        values: short texts of local variables, by name; empty for recorded operations.
        lasti: index of the bytecode instruction, -1 where not known: tells apart two calls on one line.

    """

    file: str
    line: int
    function: str
    user: bool
    values: dict[str, str] = field(default_factory=dict)
    lasti: int = -1


@dataclass(frozen=True)
class Op:
    """One operation of a process group, as torch's flight recorder has it.

    Attributes:
        group: the group's name in torch ("0" is the default group).
        index: the how-many-th collective of its group, from 1 (collective_seq_id): equal on all ranks in step.
        kind: "all_reduce", "broadcast", ..., without the backend's name.
        sizes: of the inputs; of the outputs where there are no inputs.
        dtypes: the same: "Float", "Long", ...
        done: whether it has ended on this rank.
        frames: innermost first; all of them.
        time_ns: when it was asked for, by this machine's clock.
        root: source or destination rank where known.

    """

    group: str
    index: int
    kind: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool
    frames: tuple[Frame, ...]
    time_ns: int = 0
    root: int | None = None

    def user_site(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return next((one for one in self.frames if one.user), None)


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it.

    Attributes:
        name: torch's.
        members: ranks of the world, in the group's order.
        asked: collectives asked for so far (the sequence number).

    """

    name: str
    members: tuple[int, ...]
    asked: int


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life, several times a second.

    Attributes:
        rank: of the world.
        pid: its process.
        count: how many before this one.
        time_s: when, by the machine's monotonic clock.
        groups: all groups that this rank is in.
        stack: of the main thread, innermost first, without values.
        still_s: seconds since stack and groups last changed.
        ended: None while it runs; how it ended otherwise (told by the recorder in leaving).

    """

    rank: int
    pid: int
    count: int
    time_s: float
    groups: tuple[Group, ...]
    stack: tuple[Frame, ...]
    still_s: float
    ended: End | None = None


@dataclass(frozen=True)
class Raised:
    """An exception.

    Attributes:
        kind: its class.
        text: its message, shortened.
        frames: where it was raised, innermost first.

    """

    kind: str
    text: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Snapshot:
    """All that a rank knows, asked for when something is wrong, and written when it leaves.

    Attributes:
        beat: at the same moment.
        ops: the last operations of all groups, in the order in which they were asked for.
        stack: of the main thread, innermost first, with values in the user's frames.
        handled: exceptions that the main thread is handling just now.
        last_raised: the exception that ends the rank, where one does.
        facts: fingerprints of what has to be equal on all ranks, by name: "seed", "learning rate", "len(data)", ...

    """

    beat: Beat
    ops: tuple[Op, ...]
    stack: tuple[Frame, ...]
    handled: tuple[Raised, ...] = ()
    last_raised: Raised | None = None
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """What the system says of a rank's process, looked at from outside.

    Attributes:
        alive: whether it is there.
        state: of the main thread, as in proc(5): R, S, D, T, Z.
        busy: share of one core that it and its children used lately, 0 to their number.
        exit_code: once it has ended: 128 + N for signal N.
        waits_in: the kernel function or system call where it sleeps, where the system tells.
        last_words: the end of what it wrote, where it ended badly.
        woke_s: seconds since the main thread last ran, by its count of context switches; None where that is not known.
            One that sleeps in a read and gets a little now and then wakes each time, though its stack stays the same.

    """

    alive: bool
    state: str = ""
    busy: float = 0.0
    exit_code: int | None = None
    waits_in: str = ""
    last_words: str = ""
    woke_s: float | None = None


@dataclass(frozen=True)
class View:
    """One rank, as the watch sees it.

    Attributes:
        rank: of the world.
        host: its machine.
        process: what the system says.
        snapshot: the last one, None if there was none.
        age_s: seconds since the snapshot's beat was made.
        beat: the last sign of life, perhaps younger than the snapshot.
        silent_s: seconds since the last sign of life.

    """

    rank: int
    host: str
    process: Process
    snapshot: Snapshot | None = None
    age_s: float = 0.0
    beat: Beat | None = None
    silent_s: float = 0.0


def as_json(value: Any) -> dict[str, Any]:
    """A record as nested dicts and lists."""
    return asdict(value)
