"""The side-car: the watch of a node whose ranks srun, mpirun or torchrun has started.

One process a node, outside the ranks, in a session of its own. It ends when its ranks have gone, whatever ended them.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.guard import folders, report, stacks, storage
from instep.guard.nodes import Hub, Link, LostError, Remote, ask_stacks, connect, take_stacks
from instep.guard.report import near
from instep.guard.watch import LOOK_S, Found, Watch
from instep.guard.witness import Witness
from instep.runs import EXIT_OUT_OF_STEP, create_folder, default_name
from instep.runs.record import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SUSPECT_S = 8.0
_KILL_S = 2.0  # what a rank has to leave by itself
_CULPRIT_S, _OTHERS_S = 0.5, 0.65  # after the order, when all recorders have seen it
_SOON_S = 0.05  # while a leaf looks for its hub
_LINGER_S = 0.4  # what the ranks of other nodes have to end after those of this one
_AFTER_FAILURE_S = 5.0  # a launcher ends the other ranks of one that has failed: no verdict on that


@dataclass
class Plan:
    """What the rank that starts the side-car tells it; see ``instep.comm.guarding``."""

    world_size: int
    host: str
    pids: dict[int, int]
    others: list[dict[str, Any]]
    hub: bool
    token: str
    script: str
    cwd: str
    meet: list[list[Any]]
    listens: int | None

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Of the file in the folder."""
        told = json.loads((folder / "sidecar.json").read_text())
        told["pids"] = {int(rank): pid for rank, pid in told["pids"].items()}
        return cls(**told)


class Ranks:
    """The processes of the ranks of this node: no children of ours, so their ends are seen by pidfd."""

    def __init__(self, folder: Path, pids: dict[int, int]) -> None:
        self.pids = pids
        self.codes: dict[int, int | None] = {}
        self._folder = folder
        self._descriptors: dict[int, int] = {}
        for rank, pid in pids.items():
            try:
                self._descriptors[rank] = os.pidfd_open(pid)
            except OSError:
                self.codes[rank] = self._code(rank)

    @property
    def alive(self) -> list[int]:
        """Those that have not ended."""
        return [rank for rank in self.pids if rank not in self.codes]

    def wait(self, seconds: float, more: Sequence[int] = ()) -> list[int]:
        """Wait until a rank ends, or something is to be read.

        Args:
            seconds: how long at most.
            more: further descriptors.

        Returns:
            The ranks that have ended since the last call.

        """
        waiting = select.poll()
        for descriptor in (*self._descriptors.values(), *more):
            waiting.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, seconds) * 1000)}
        ended = [rank for rank, descriptor in self._descriptors.items() if descriptor in ready]
        for rank in ended:
            os.close(self._descriptors.pop(rank))
            self.codes[rank] = self._code(rank)
        return ended

    def kill(self, rank: int) -> None:
        """SIGKILL, and never to a process that got the number since."""
        with suppress(OSError, KeyError):
            signal.pidfd_send_signal(self._descriptors[rank], signal.SIGKILL)

    def end(self, first: Sequence[int]) -> None:
        """End all, the culprits first."""
        begin = time.monotonic()
        for rank in self.alive:
            storage.order_end(self._folder, rank, begin + (_CULPRIT_S if rank in first else _OTHERS_S))
        while self.alive and time.monotonic() < begin + _KILL_S:
            self.wait(begin + _KILL_S - time.monotonic())
        for rank in self.alive:
            self.kill(rank)
        while self.alive and time.monotonic() < begin + 2 * _KILL_S:
            self.wait(begin + 2 * _KILL_S - time.monotonic())

    def _code(self, rank: int) -> int | None:
        """Nobody tells the exit code of a process that is no child: what the recorder has left says most of it."""
        beat = storage.read_beat(self._folder, rank)
        if beat is not None and beat.ended is not None:
            return 0 if beat.ended == "finished" else 1
        return 128 + signal.SIGABRT if "Fatal Python error: Aborted" in storage.read_fatal(self._folder, rank) else None


class Teller:
    """Says what was found: on standard error, and in a run folder that is made for it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._said: list[dict[str, Any]] = []
        self._run: Path | None = None

    def note(self, line: str) -> None:
        """A line that may go on."""
        self._print([f"… {line}"])

    def raw(self, texts: Iterable[str]) -> None:
        """The stacks that an interpreter wrote when a signal ended it."""
        self._print(text.rstrip() for text in texts if text)

    def tell(self, found: Found, texts: dict[int, str]) -> None:
        """A verdict, once."""
        said = found.as_json()
        key = (said["kind"], said["ranks"], said["left_at"], said["silent"])
        if any(key == (one["kind"], one["ranks"], one["left_at"], one["silent"]) for one in self._said):
            return
        silent = found.verdict.silent
        self._said.insert(len(self._said) if silent else 0, said)
        first, *others = self._said
        end = "" if silent else f"job ended (exit code {EXIT_OUT_OF_STEP})"
        try:
            run = self._folder()
            if not silent:
                stacks.write(run / "stacks", found.views, texts)
                end = f"{end}. Stacks of all ranks: {near(str(run / 'stacks'))}   ·   "
            whole = {**first, "others": others} if others else first
            write_whole(run / "desync.json", json.dumps(whole, indent=2).encode() + b"\n")
            end += f"again: instep why {near(str(run))}"
        except Exception as error:  # noqa: BLE001  # a full disk does not make the ranks be in step
            end += f"   (nothing is kept: {error})"
        self._print(report.text(found.verdict, found.after_s, end=end).splitlines())

    def _folder(self) -> Path:
        if self._run is None:
            when = datetime.now(timezone.utc).astimezone()
            self._run = create_folder(Path(self._plan.cwd) / "runs", None, default_name(self._plan.script, when))
        return self._run

    def _print(self, lines: Iterable[str]) -> None:
        with suppress(OSError, ValueError):
            # In one piece: the launcher puts lines of other ranks between.
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()


class SideCar:
    """Watches the ranks of this node, and ends them where they are out of step.

    Args:
        folder: where they write.
        plan: who they are.

    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._ranks = Ranks(folder, plan.pids)
        self._teller = Teller(plan)
        self._remotes = [Remote(one["host"], one["ranks"]) for one in plan.others]
        self._hub = None
        if plan.listens is not None:
            self._hub = Hub(socket.socket(fileno=plan.listens), plan.token, self._remotes)
        self._watch = Watch(
            folder,
            plan.world_size,
            plan.host,
            suspect_s=_SUSPECT_S,
            ranks=sorted(plan.pids),
            nodes=self._remotes,
        )
        self._quiet_until = 0.0
        self._codes: dict[int, int | None] = {}  # of all nodes, as far as they were looked at
        self._broken = self._has_ended = False

    def run(self) -> None:
        """Until all ranks of this node have gone."""
        while self._ranks.alive:
            self._ranks.wait(
                min(self._watch.next_at - time.monotonic(), LOOK_S), self._hub.descriptors() if self._hub else ()
            )
            self._look()
        self._wait_for_others()
        if not self._has_ended and not any(code != 0 for code in self._all_codes().values()):
            last = self._safely(partial(self._watch.final, self._ranks.pids, self._codes, wait_s=0))
            if last is not None and last.verdict.silent:
                self._teller.tell(last, {})

    def _look(self) -> None:
        codes = self._all_codes()
        ended = codes.keys() - self._codes.keys()
        self._codes = codes
        found = self._safely(partial(self._after, ended)) if ended else None
        if found is None and self._ranks.alive and time.monotonic() >= self._quiet_until and self._all_are_there():
            found = self._safely(partial(self._watch.look, self._ranks.pids, codes))
        for line in self._watch.take_notes():
            self._teller.note(line)
        if found is not None:
            self._act(found)

    def _wait_for_others(self) -> None:
        """The ranks of this node have gone; those of the others go too in a moment, or are left waiting for these."""
        begin = time.monotonic()
        while self._hub and not self._has_ended and time.monotonic() < begin + _LINGER_S:
            if all(remote.has_ended or remote.is_lost for remote in self._remotes):
                return
            self._ranks.wait(0.1, self._hub.descriptors())
            self._look()
        if self._hub and not self._has_ended and self._all_are_there():
            found = self._safely(partial(self._watch.final, self._ranks.pids, self._codes, wait_s=0.4))
            if found and found.verdict.proven and not found.verdict.silent and not _is_own_failure(found):
                self._act(found)

    def _all_codes(self) -> dict[int, int | None]:
        if self._hub:
            self._hub.pump()
        codes = dict(self._ranks.codes)
        for remote in self._remotes:
            codes |= remote.codes
        return codes

    def _all_are_there(self) -> bool:
        """Whether all nodes tell what they see; where one is lost, nobody can say who waits for whom."""
        lost = [remote.host for remote in self._remotes if remote.is_lost]
        if lost and not self._broken:
            self._broken = True
            self._teller.note(f"the ranks are not watched any more: no word from the guard on {', '.join(lost)}")
        return all(remote.link is not None or remote.has_ended for remote in self._remotes)

    def _after(self, ended: Iterable[int]) -> Found | None:
        """Ranks have ended: whether they left others waiting, or failed only because others did."""
        codes = [self._codes[rank] for rank in ended if self._codes[rank] != 0]
        if codes:
            self._quiet_until = time.monotonic() + _AFTER_FAILURE_S
        found = None
        if any(code is not None for code in codes) and self._all_are_there():  # else somebody has killed them
            found = self._watch.final(self._ranks.pids, self._codes)
        if found is None or found.verdict.silent or not found.verdict.proven or _is_own_failure(found):
            self._teller.raw([storage.read_fatal(self._folder, rank) for rank in ended])
            return None
        return found

    def _act(self, found: Found) -> None:
        if found.verdict.silent:
            self._teller.tell(found, {})
            return
        alive = {rank: pid for rank, pid in self._ranks.pids.items() if rank not in self._ranks.codes}
        ask_stacks(self._remotes)
        texts = stacks.collect(self._folder, alive, found.views)
        texts |= take_stacks(self._remotes)
        self._teller.tell(found, texts)
        self._has_ended = True
        for remote in self._remotes:
            remote.send({"end": list(found.verdict.ranks)})
        self._ranks.end(found.verdict.ranks)

    def _safely(self, look: Callable[[], Found | None]) -> Found | None:
        """Whatever ails the guard, the job goes on; it is said once."""
        if self._broken:
            return None
        try:
            return look()
        except Exception:  # noqa: BLE001
            self._broken = True
            self._quiet_until = float("inf")
            self._teller.note("the ranks are not watched any more: an error in the guard")
            traceback.print_exc()
            return None


class Leaf:
    """The side-car of a node other than the main rank's: tells the hub what it sees, and does what that says.

    Args:
        folder: where the ranks write.
        plan: who they are.

    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._ranks = Ranks(folder, plan.pids)
        self._witness = Witness(folder, plan.world_size, plan.host, sorted(plan.pids))
        self._links: list[Link | None] = []  # filled by the thread that connects
        self._link: Link | None = None

    def run(self) -> None:
        """Until all ranks of this node have gone."""
        threading.Thread(target=self._connect, daemon=True).start()
        while self._ranks.alive:
            pause = LOOK_S if self._links else _SOON_S
            if self._link is not None:
                pause = self._witness.next_at - time.monotonic()
            ended = self._ranks.wait(pause, [self._link.fileno()] if self._link else ())
            if self._link is None and self._links:
                self._link = self._links[0]
            if self._link is not None:
                try:
                    self._serve(self._link, at_once=bool(ended))
                except (LostError, OSError):
                    self._link = None  # the job goes on without the guard; its hub says so, if it is there
        if self._link is not None:
            with suppress(LostError):
                for told in self._witness.tell(self._ranks.pids, self._ranks.codes, at_once=True):
                    self._link.send(told)

    def _connect(self) -> None:
        link = connect(self._plan.meet, self._plan.token, min(self._plan.pids))
        if link is None:
            print(
                f"… the ranks are not watched: the guard on {self._plan.host} cannot reach that of the main rank at "
                f"{', '.join(f'{name}:{port}' for name, port in self._plan.meet) or 'no address'}",
                file=sys.stderr,
                flush=True,
            )
        self._links.append(link)

    def _serve(self, link: Link, *, at_once: bool) -> None:
        pids, codes = self._ranks.pids, self._ranks.codes
        for message in link.receive():
            for answer in self._witness.take(message, pids, codes):
                link.send(answer)
            if "end" in message:
                self._ranks.end([int(rank) for rank in message["end"]])
                at_once = True
        for told in self._witness.tell(pids, codes, at_once=at_once):
            link.send(told)


def _is_own_failure(found: Found) -> bool:
    """Whether all that is said is that a rank has failed, which is no falling out of step."""
    codes = [view.process.exit_code for view in found.views if view.rank in found.verdict.ranks]
    return found.verdict.kind == "dead" and 0 not in codes


def main(name: str) -> None:
    """Watch the ranks of the folder, to their end.

    Args:
        name: the folder.

    """
    folder = Path(name)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks; without ranks this ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lock = folders.hold(folder)
    try:
        plan = Plan.read(folder)
        with suppress(OSError):
            os.chdir(plan.cwd)
        folders.clean()
        (SideCar if plan.hub else Leaf)(folder, plan).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    os._exit(0)  # the launcher may wait for this process: nothing is left that Python would have to tidy up
