"""Sums and means over all ranks, exact: whole numbers stay whole, means are weighted by counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, overload

from instep.comm.objects import gather_objects
from instep.comm.session import together
from instep.errors import StepError

if TYPE_CHECKING:
    import torch


@overload
def total(value: int) -> int: ...
@overload
def total(value: float) -> float: ...
@overload
def total(value: Mapping[str, Any]) -> dict[str, Any]: ...
@overload
def total(value: Any) -> Any: ...
def total(value: Any) -> Any:
    """The sum of a value over all ranks, on every rank.

    Whole numbers of any size are summed as such. Floats are summed with one rounding at the end (:func:`math.fsum`),
    so the result does not depend on the order of the ranks. Tensors of more than one element are summed element by
    element, in int64 or float64 until the end.

    Args:
        value: a number, a tensor of the same shape and dtype on every rank, or a dict of them with the same keys.

    Raises:
        StepError: the ranks have not joined, or came with different keys, kinds, shapes or dtypes.

    """
    if isinstance(value, Mapping):
        return _by_key(value, lambda values: [_sum(values[key], key) for key in values], "total")
    if _is_array(value):
        return _sum_tensors(value, None)[0]
    return _sum(gather_objects(_plain(value)), "the value")


@overload
def mean(value: float, count: float) -> float: ...
@overload
def mean(value: Mapping[str, Any], count: float) -> dict[str, float]: ...
@overload
def mean(value: Any, count: Any) -> Any: ...
def mean(value: Any, count: float) -> Any:
    """The mean over all samples of all ranks, from each rank's own mean and its number of samples.

    ::

        # wrong: a mean of means; 1.0 over 3 samples and 6.0 over 2 gives 3.5
        loss = sum(instep.gather_objects(loss)) / instep.world_size()
        # right: 3.0
        loss = instep.mean(loss, count=len(samples))

    Args:
        value: this rank's mean: a number, a tensor, or a dict of numbers with the same keys on every rank. It is not
            looked at where `count` is 0 (a rank without data may bring None or NaN).
        count: the number of samples (or tokens, or any weight) behind it on this rank.

    Raises:
        StepError: the ranks have not joined, no rank has a sample, a count is negative or not finite, or the ranks
            came with different keys or shapes.

    """
    count = _plain(count)
    if _is_array(value):
        return _mean_tensors(value, count)
    if isinstance(value, Mapping):
        return _by_key(value, lambda values: _means(values, gather_objects(count)), "mean", counts=count)
    pairs = gather_objects((_plain(value) if count else 0, count))
    return _weighted([one for one, _ in pairs], [number for _, number in pairs])


def _plain(value: Any) -> Any:
    """A Python number for what holds one: a tensor or numpy value of one element."""
    return value.item() if hasattr(value, "item") else value


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and math.prod(value.shape) != 1


def _sum(values: Sequence[Any], what: str) -> Any:
    for rank, one in enumerate(values):
        if not isinstance(one, (int, float)):
            raise StepError(f"{what} is no number on rank {rank}.", evidence=[repr(one)[:200]])
    if all(isinstance(one, int) for one in values):
        return sum(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities, and sums beyond them: what plain addition makes of them
        return float(sum(values))


def _weighted(values: Sequence[Any], counts: Sequence[Any]) -> float:
    for rank, count in enumerate(counts):
        if not isinstance(count, (int, float)) or not math.isfinite(count) or count < 0:
            raise StepError(f"The count on rank {rank} is {count!r}: no number of samples.")
    weight = _sum(counts, "the count")
    if not weight:
        raise StepError(
            "There is no mean: no rank has a sample.", evidence=[f"counts of ranks 0 to {len(counts) - 1}: all 0"]
        )
    pairs = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    _sum([value for value, _ in pairs], "the value")  # refuses what is no number
    if all(math.isfinite(value) for value, _ in pairs):
        # Fractions make the products and their sum exact; the one rounding is the last line's.
        exact = sum((Fraction(value) * Fraction(count) for value, count in pairs), Fraction())
        return float(exact / Fraction(weight))
    return float(sum(value * count for value, count in pairs) / weight)


def _by_key(value: Mapping[str, Any], reduce: Any, piece: str, counts: Any = None) -> dict[str, Any]:
    """Gather a dict of numbers in one go, check that all ranks have the same keys, reduce each key."""
    mine = {key: _plain(one) for key, one in value.items()} if counts is None or counts else dict.fromkeys(value, 0)
    everyone = gather_objects(mine)
    for rank, other in enumerate(everyone):
        if other.keys() != mine.keys():
            raise StepError(
                f"{piece}() needs the same keys on every rank.",
                evidence=[f"rank {rank}: {sorted(other)}", f"this rank: {sorted(mine)}"],
                cure="Let every rank bring every key, with count 0 where it has nothing to say.",
            )
    results = reduce({key: [other[key] for other in everyone] for key in mine})
    return dict(zip(mine, results, strict=True))


def _means(values: Mapping[str, Sequence[Any]], counts: Sequence[Any]) -> list[float]:
    return [_weighted(column, counts) for column in values.values()]


def _sum_tensors(value: torch.Tensor, count: Any) -> tuple[torch.Tensor, list[Any]]:
    """(the tensors of all ranks summed, the counts of all ranks); with a count, each is weighted by it."""
    import torch

    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    session = together("total" if count is None else "mean")
    kinds = gather_objects((tuple(value.shape), str(value.dtype), count))
    for rank, (shape, dtype, _) in enumerate(kinds):
        if (shape, dtype) != kinds[0][:2]:
            raise StepError(
                "A tensor has to have the same shape and dtype on every rank.",
                evidence=[f"rank 0: {list(kinds[0][0])} {kinds[0][1]}", f"rank {rank}: {list(shape)} {dtype}"],
            )
    wide = torch.float64 if count is not None or value.dtype.is_floating_point else torch.int64
    summed = value.detach().to(wide, copy=True).contiguous()
    if count is not None:
        summed = summed * count if count else torch.zeros_like(summed)
    if session.world_size > 1:
        import torch.distributed as dist

        # On the CPU, where float64 and the gloo group always are.
        summed = summed.cpu()
        dist.all_reduce(summed, group=session.group)
    if count is None:
        summed = summed.to(value.dtype if value.dtype.is_floating_point else torch.int64)
    return summed.to(value.device), [number for _, _, number in kinds]


def _mean_tensors(value: torch.Tensor, count: Any) -> torch.Tensor:
    import torch

    summed, counts = _sum_tensors(value, count)
    _weighted([0] * len(counts), counts)  # refuses bad counts, alike on every rank
    result = summed / float(_sum(counts, "the count"))
    dtype = getattr(value, "dtype", None)
    return result.to(dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else result
