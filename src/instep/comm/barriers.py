"""Barriers that say who is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from instep.comm.session import together
from instep.comm.waiting import store_gone, wait_for
from instep.errors import StepError

if TYPE_CHECKING:
    from instep.comm.session import Session


def barrier(name: str = "barrier", timeout: float | None = None) -> None:
    """Wait until all ranks are here.

    Args:
        name: what the place is called in errors; ranks that wait at different names do not meet.
        timeout: seconds to wait for the others; None: that of ``instep.init()``.

    Raises:
        StepError: some ranks did not come in time (they are named, with where they were last seen), or the ranks
            have not joined.

    """
    session = together(f"barrier({name!r})")
    if session.store is None or session.world_size == 1:
        return
    turn = session.turn(f"barrier {name}")
    limit = session.timeout if timeout is None else timeout
    if not meet(session, f"{name} #{turn}", limit):
        raise _missing(session, name, turn, limit)
    if session.is_main and turn > 1:  # nobody is at the former turn any more: all have come to this one
        for key in ("count", "open"):
            session.store.delete_key(f"place/{name} #{turn - 1}/{key}")


def meet(session: Session, place: str, timeout: float) -> bool:
    """Come to a place and wait there for all ranks; whether they all came.

    Raises:
        StepError: the process that holds the store is gone.

    """
    store = session.store
    assert store is not None  # a world of one does not wait
    try:
        # A rank that waited in vain and went on has still been there: it must not be called missing by the others.
        store.set(f"at/{session.rank}", json.dumps([place, *session.gave_up]))
        if store.add(f"place/{place}/count", 1) == session.world_size:
            store.set(f"place/{place}/open", "1")
            return True
    except RuntimeError as error:
        raise store_gone(error) from None

    def doing() -> str:
        return f"waiting at {place!r} for rank{_numbers(absent(session, place))}"

    came = wait_for(store, [f"place/{place}/open"], timeout, doing)
    if not came:
        session.gave_up.append(place)
    return came


def absent(session: Session, place: str) -> list[int]:
    """The ranks that have not come to the place."""
    return [rank for rank in range(session.world_size) if place not in _seen_at(session, rank)]


def _seen_at(session: Session, rank: int) -> list[str]:
    """Where the rank is, or was last, and where it waited in vain before."""
    store = session.store
    assert store is not None  # as above
    places: list[str] = json.loads(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else []
    return places


def _missing(session: Session, name: str, turn: int, limit: float) -> StepError:
    ranks = absent(session, f"{name} #{turn}")
    evidence = []
    for rank in ranks[:20]:
        host = f" on {session.hosts[rank]}" if session.hosts else ""
        places = _seen_at(session, rank)
        evidence.append(f"rank {rank}{host}: {f'last seen at {places[0]}' if places else 'at no barrier so far'}")
    return StepError(
        f"barrier({name!r}) waited {limit:g} s for rank{_numbers(ranks)}, in vain.",
        evidence=evidence,
        cure="See what the missing ranks do instead (a barrier under `if rank == 0`, another name, an error, or only "
        "slow work: then give a longer timeout).",
    )


def _numbers(ranks: list[int]) -> str:
    """``s 1, 2 and 3`` or `` 1``, to go behind the word rank."""
    if len(ranks) == 1:
        return f" {ranks[0]}"
    shown = [str(rank) for rank in ranks[:20]] + (["..."] if len(ranks) > 20 else [])
    return f"s {', '.join(shown[:-1])} and {shown[-1]}" if shown else "s (all came just now)"
