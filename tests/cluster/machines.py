"""Real Debian machines for tests: a sandbox that ``instep sandbox`` makes, and what a test does to it."""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.commands import Result, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

INSTEP = str(Path(sys.executable).with_name("instep"))
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sandbox:
    """Machines n1, n2, ...; `share` is a folder that they see at the same path as this host."""

    name: str
    inventory: Path
    ssh_config: Path
    nodes: tuple[str, ...]
    share: Path
    touched: list[str] = field(default_factory=list)  # machines that a test has cut off or switched off

    def exec(
        self,
        node: str,
        argv: Sequence[str | Path],
        *,
        limit_s: float = 60.0,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Result:
        """Run a command on a machine as root, also where its network is cut; in `share` unless `cwd` says where."""
        words = [f"{key}={value}" for key, value in (env or {}).items()]
        argv = ["env", *words, *argv] if words else argv
        return self.tool("exec", node, *argv, limit_s=limit_s, cwd=cwd or self.share, stdin=stdin)

    def tool(
        self, verb: str, *words: str | Path, limit_s: float = 60.0, cwd: str | Path | None = None, stdin: str = ""
    ) -> Result:
        """``instep sandbox VERB --name ... WORDS``."""
        argv = [INSTEP, "sandbox", verb, "--name", self.name, *words]
        return run_command(argv, limit_s=limit_s, cwd=cwd, stdin=stdin)

    def cut(self, node: str) -> None:
        """Lose all packets of a machine."""
        self.touched.append(node)
        self.tool("cut", node).ok()

    def heal(self, node: str) -> None:
        """Give it back its network."""
        self.tool("heal", node).ok()

    def kill(self, node: str) -> None:
        """Take its power away."""
        self.touched.append(node)
        self.tool("kill", node).ok()

    def start(self, node: str) -> None:
        """Switch it on again."""
        self.tool("start", node).ok()

    def status(self) -> dict[str, Any]:
        """What ``instep sandbox status`` says of it."""
        (found,) = json.loads(self.tool("status", "--json").ok().out)["sandboxes"]
        return dict(found)

    def folder(self) -> Path:
        """A new empty folder that all machines see, and every user may write to."""
        made = self.share / uuid.uuid4().hex[:8]
        made.mkdir()
        made.chmod(0o777)
        return made

    def restore(self) -> None:
        """All machines on, and none cut off: what the next test finds."""
        if not self.touched:
            return
        self.touched.clear()
        for machine in self.status()["machines"]:
            if machine["cut"]:
                self.heal(machine["name"])
            if not machine["power"]:
                self.start(machine["name"])


@contextmanager
def sandbox(share: Path, *options: str, nodes: int = 3, name: str = "") -> Iterator[Sandbox]:
    """A sandbox of this test run's own; it is gone at the end.

    Args:
        share: a folder that all machines see, besides the repository.
        options: more of them for ``instep sandbox up``.
        nodes: how many machines.
        name: its name; by default one that nobody else has.

    """
    name = name or f"t-{uuid.uuid4().hex[:6]}"
    share.chmod(0o777)
    shares = ["--share", str(share), "--share", str(ROOT)]
    words = ["sandbox", "up", "--json", "--name", name, "--nodes", str(nodes), *shares, *options]
    try:
        # An image may have to be made first. (The machines outlive the command: they have an environment of their own.)
        made = json.loads(run_command([INSTEP, *words], limit_s=600).ok().out)
        names = tuple(machine["name"] for machine in made["machines"])
        yield Sandbox(name, Path(made["inventory"]), Path(made["ssh_config"]), names, share)
    finally:
        if name in _names():
            run_command([INSTEP, "sandbox", "down", "--name", name], limit_s=60).ok()


def _names() -> list[str]:
    found = run_command([INSTEP, "sandbox", "status", "--json"]).ok()
    return [one["name"] for one in json.loads(found.out)["sandboxes"]]
