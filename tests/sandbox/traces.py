"""What a sandbox can leave on a host, looked for without the help of instep."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

BASE = Path("/var/lib/instep/sandbox")


def traces(name: str, wait_s: float = 0.0) -> list[str]:
    """All that is left of a sandbox of that name (at most 12 letters), after at most `wait_s` to go away."""
    deadline = time.monotonic() + wait_s
    while (found := _look(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _look(name: str) -> list[str]:
    folder = str(BASE / name)
    found = [f"file {folder}"] if Path(folder).exists() else []
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    found += [f"link {line}" for line in links if f" is-{name}" in line]
    found += [f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob(f"**/*instep?{name}?*")]
    found += [f"namespace {path}" for path in Path("/run/netns").glob("*")] if Path("/run/netns").is_dir() else []
    return found + [f"process {one}" for one in _processes(folder)]


def _processes(folder: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                texts = [(entry / part).read_bytes() for part in ("cmdline", "environ", "mountinfo")]
                if any(f"{folder}{end}".encode() in text for text in texts for end in ("/", "\0")):
                    found.append(f"{entry.name}: {texts[0][:200].decode(errors='replace')}")
    return found
