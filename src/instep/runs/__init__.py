"""What happened: the run folder, ``run.json``, and the outcome of a run.

Needs the standard library only.
"""

from __future__ import annotations

from instep.runs.folder import create_folder, current_folder, default_name
from instep.runs.git import GitFacts, git_facts
from instep.runs.outcome import EXIT_OUT_OF_STEP, EXIT_PREEMPTED, Outcome, exit_code_of, judge
from instep.runs.record import RunRecord, now

__all__ = [
    "EXIT_OUT_OF_STEP",
    "EXIT_PREEMPTED",
    "GitFacts",
    "Outcome",
    "RunRecord",
    "create_folder",
    "current_folder",
    "default_name",
    "exit_code_of",
    "git_facts",
    "judge",
    "now",
]
