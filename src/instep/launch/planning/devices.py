"""The GPUs of this machine, counted without torch and without waking a driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def count_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that a process with this environment would see."""
    present = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())
    return visible(present, environ.get("CUDA_VISIBLE_DEVICES"))


def visible(present: int, mask: str | None) -> int:
    """How many of the GPUs CUDA_VISIBLE_DEVICES leaves: CUDA ignores all from the first unknown one on."""
    if mask is None:
        return present
    seen: list[str] = []
    for name in (part.strip() for part in mask.split(",")):
        known = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < present)
        if not known or name in seen:
            break
        seen.append(name)
    return len(seen) if present else 0
