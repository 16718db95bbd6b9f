"""Start it everywhere: a request becomes a plan, and the plan is carried out. Needs no torch."""

from __future__ import annotations

from pathlib import Path


def zygote_path() -> str:
    """The file of the fork server, which is started as a script: see :mod:`instep.launch.zygote`."""
    return str(Path(__file__).with_name("zygote.py"))
