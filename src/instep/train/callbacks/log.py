"""``metrics.jsonl``: all reports and evaluations of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.comm import get_logger
from instep.errors import TrainError
from instep.runs.record import write_whole
from instep.train.callbacks.progress import last_epoch
from instep.train.events import Callback

if TYPE_CHECKING:
    from io import BufferedWriter

    from instep.train.state import Report
    from instep.train.trainer import Trainer

NAME = "metrics.jsonl"


class MetricsLog(Callback):
    """Append each report and each evaluation to ``metrics.jsonl`` in the run folder, by the main rank.

    ::

        {"kind": "report", "step": 50, "epoch": 0, "samples": 4800, "time": 1767225600.1, "values": {"loss": 0.41, ...}}
        {"kind": "evaluation", "step": 150, "epoch": 0, "samples": 14400, "time": ..., "values": {"accuracy": 0.93}}

    ``time`` is in seconds since 1970, by the main rank's clock. JSON has no NaN and no infinity: they are written as
    the strings "nan", "inf" and "-inf", which Python's float() reads.

    A run that goes on from step k continues its file. Records beyond step k, from the time between the checkpoint
    and the end of the run before, are moved to ``metrics.dropped.jsonl``, and so is half a line that a killed process
    left: the steps in ``metrics.jsonl`` never go back, none is there twice, and nothing is lost.

    A disk that is full ends the log with a warning, and not the training.

    Args:
        file: another file; None: ``metrics.jsonl`` in the run folder.

    """

    ranks = "main"

    def __init__(self, file: str | Path | None = None) -> None:
        self._path = None if file is None else Path(file)
        self._file: BufferedWriter | None = None
        self._kept: set[tuple[str, int]] = set()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the file, and take out what the run will do again."""
        path = self._path or (trainer.folder / NAME if trainer.folder else None)
        if path is None:
            raise TrainError(
                "There is no folder for the metrics log: this program was not started by `instep run`.",
                cure=f"Say where: MetricsLog({NAME!r})",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._kept = _cut(path, trainer.progress.step)
            self._file = path.open("ab")
        except OSError as error:
            self._give_up(error)

    def on_report(self, trainer: Trainer, report: Report) -> None:  # noqa: ARG002
        """Write the report."""
        figures = ("loss", "lr", "samples_per_s", "data_wait", "step_s", "skipped", "seconds")
        values = {name: getattr(report, name) for name in figures}
        self._write("report", report.step, report.epoch, report.samples, {**values, **report.values})

    def on_evaluate_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """Write the metrics."""
        progress = trainer.progress
        self._write("evaluation", progress.step, last_epoch(progress), progress.samples, results)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        """Close the file."""
        self._close()

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Close the file."""
        self._close()

    def _write(self, kind: str, step: int, epoch: int, samples: int, values: dict[str, Any]) -> None:
        if self._file is None or (kind, step) in self._kept:
            return
        record = {"kind": kind, "step": step, "epoch": epoch, "samples": samples, "time": round(time.time(), 3)}
        line = json.dumps({**record, "values": _plain(values)}, allow_nan=False)
        try:
            # One write of a whole line, at once on its way to the disk: a reader may follow the file.
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        get_logger().warning("The metrics log ends here, and training goes on: %s", error)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:  # what could not be written is tried again, and has been complained of
            pass


def _plain(value: Any) -> Any:
    """A value that JSON has: numbers of one element become plain, what is not finite a string."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # a tensor or a numpy number
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cut(path: Path, step: int) -> set[tuple[str, int]]:
    """Move records beyond `step`, and what is no record, to another file; (kind, step) of those that stay at `step`.

    Raises:
        OSError: a file cannot be read or written; no record is lost.

    """
    if not path.is_file():  # there is none yet, or it is a device
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    read = [_read(line) for line in lines]
    stays = [one is not None and one[1] <= step for one in read]
    if not all(stays):
        gone = b"".join(line.rstrip(b"\n") + b"\n" for line, stay in zip(lines, stays, strict=True) if not stay)
        with path.with_name(f"{path.stem}.dropped{path.suffix}").open("ab") as dropped:
            dropped.write(gone)
        write_whole(path, b"".join(line for line, stay in zip(lines, stays, strict=True) if stay))
    return {one for one in read if one is not None and one[1] == step}


def _read(line: bytes) -> tuple[str, int] | None:
    """(kind, step) of a whole record."""
    try:
        record = json.loads(line)
        return (str(record["kind"]), int(record["step"])) if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError):
        return None
