"""A verdict in words, and as ``desync.json``. Pure, but for the names of paths."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from instep.guard.verdicts import LeftAt, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MOST_EVIDENCE = 8  # lines on the screen; desync.json has all
_MOST_PLACES = 12
_LONGEST = 120  # characters of a line of source
_NOT_LEFT, _SAME_CALL = "it has not left the common path", "the same call on all ranks"  # of LeftAt.why
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8",
    "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def text(verdict: Verdict, detected_after_s: float | None = None, *, end: str = "") -> str:
    """The report for people.

    Args:
        verdict: what was found.
        detected_after_s: seconds since it happened, None where not known.
        end: a last line: what is done about it.

    """
    lines = [_headline(verdict, detected_after_s)]
    if verdict.left_at is not None:
        lines.append(f"  {_left_at(verdict, verdict.left_at)}")
    if verdict.reason:
        lines.append(f"  {verdict.reason}")
    lines += [f"  {line}" for line in _places(verdict.waiting)]
    told = [line for item in verdict.evidence for line in item.splitlines()]
    lines += [f"  {line}" for line in told[:_MOST_EVIDENCE]]
    if len(told) > _MOST_EVIDENCE:
        lines.append(f"  ... {len(told) - _MOST_EVIDENCE} more lines of evidence in desync.json")
    if end:
        lines.append(f"  {end}")
    return "\n".join(lines)


def _headline(verdict: Verdict, detected_after_s: float | None) -> str:
    if verdict.silent:
        return "! ranks differ, and nothing fails or waits: what they compute may be wrong"
    sure = "" if verdict.proven else ", as it seems: none of them moves"
    after = "" if detected_after_s is None else f" — {detected_after_s:.1f} s after it happened"
    return f"✗ ranks out of step{sure}{after}"


def _left_at(verdict: Verdict, place: LeftAt) -> str:
    many = len(verdict.ranks) != 1
    who = rank_words(verdict.ranks) if verdict.ranks else "the ranks"
    why = place.why
    verb = "left the common path"
    if _NOT_LEFT in why:
        verb, why = f"{'are' if many else 'is'} blocked", ""
    elif verdict.kind == "cycle" and why == _SAME_CALL:
        verb, why = "wait for one another", ""
    elif verdict.silent or why == _SAME_CALL:
        verb = f"{'differ' if many else 'differs'} from the others"
    parts = [f"{who} {verb} at {near(place.file)}:{place.line}"]
    parts += [part for part in (_shortened(place.source), values_words(verdict.values), why) if part]
    return "   ".join(parts)


def values_words(values: Mapping[int, str]) -> str:
    """``isfinite(loss): False on rank 1, True on ranks 0, 2``."""
    condition = _common_condition(values)
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value.removeprefix(condition), []).append(rank)
    few_first = sorted(by_value.items(), key=lambda item: (len(item[1]), item[1]))
    return condition + ", ".join(f"{_shortened(value)} on {rank_words(ranks)}" for value, ranks in few_first)


def _common_condition(values: Mapping[int, str]) -> str:
    """What all values begin with up to a colon: it is said once."""
    begins = {"".join(value.rpartition(": ")[:2]) for value in values.values()}
    return begins.pop() if len(begins) == 1 else ""


def _places(waiting: Iterable[Waiting]) -> list[str]:
    """One line for all ranks at the same place."""
    groups: dict[tuple[Any, ...], list[Waiting]] = {}
    for one in waiting:
        key = (one.op, one.index, one.shape, one.dtype, one.group, one.file, one.line)
        groups.setdefault(key, []).append(one)
    names = [rank_words([one.rank for one in ones]) for ones in groups.values()]
    wide = max(map(len, names), default=0)
    lines = []
    for name, ones in zip(names, groups.values(), strict=True):
        lines.append(f"{name:<{wide}} {_place(ones[0], many=len(ones) > 1)}")
    if len(lines) > _MOST_PLACES:
        lines[_MOST_PLACES:] = [f"... {len(lines) - _MOST_PLACES} more places in desync.json"]
    return lines


def _place(one: Waiting, *, many: bool) -> str:
    where = f"{near(one.file)}:{one.line} {_shortened(one.source)}".rstrip() if one.file else ""
    if not one.op:
        gone = "have ended, or give no sign" if many else "has ended, or gives no sign"
        return f"{'are' if many else 'is'} at {where}" if where else gone
    what = [one.op]
    if one.index is not None:
        what.append(f"#{one.index}")
    if one.shape is not None:
        what.append(f"[{', '.join(map(str, one.shape))}]")
    if one.dtype:
        what.append(dtype_name(one.dtype))
    if one.group not in {"", "0", "default_pg"}:
        what.append(f"of group {one.group}")
    return f"{'wait' if many else 'waits'} in {' '.join(what)}" + (f", from {where}" if where else "")


def rank_words(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, ``ranks 0-3, 7``."""
    found = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in found:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    said = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return f"rank{'s' if len(found) != 1 else ''} {', '.join(said)}"


def dtype_name(name: str) -> str:
    """As torch's users write it; the flight recorder says ``Float``."""
    return _DTYPES.get(name, name.removeprefix("torch."))


def near(path: str) -> str:
    """The path relative to the working folder where it lies below, else whole."""
    if not path.startswith("/"):
        return path
    short = os.path.relpath(path)
    return path if short.startswith("..") else short


def _shortened(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def as_json(verdict: Verdict, detected_after_s: float | None) -> dict[str, Any]:
    """The object of ``desync.json``."""
    values = asdict(verdict)
    place = values["left_at"]
    return {
        "kind": verdict.kind,
        "ranks": list(verdict.ranks),
        "left_at": place,
        "values": {str(rank): value for rank, value in sorted(verdict.values.items())},
        "waiting": [{**one, "dtype": dtype_name(one["dtype"])} for one in values["waiting"]],
        "detected_after_s": None if detected_after_s is None else round(detected_after_s, 3),
        "proven": verdict.proven,
        "silent": verdict.silent,
        "reason": verdict.reason,
        "evidence": list(verdict.evidence),
    }


def from_json(values: Mapping[str, Any]) -> tuple[Verdict, float | None]:
    """What :func:`as_json` gave: the verdict, and the seconds since it happened.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: this is no such object.

    """
    place = values["left_at"]
    waiting = [
        Waiting(**{**one, "shape": None if one["shape"] is None else tuple(one["shape"])}) for one in values["waiting"]
    ]
    after = values["detected_after_s"]
    verdict = Verdict(
        kind=values["kind"],
        proven=bool(values["proven"]),
        ranks=tuple(int(rank) for rank in values["ranks"]),
        left_at=None if place is None else LeftAt(**place),
        values={int(rank): str(value) for rank, value in values["values"].items()},
        waiting=tuple(waiting),
        reason=str(values["reason"]),
        evidence=tuple(map(str, values["evidence"])),
        silent=bool(values["silent"]),
    )
    return verdict, None if after is None else float(after)
